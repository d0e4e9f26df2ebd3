"""Exchanges: how a question of a codec is answered by the group."""

from gradientflow.exchange.control import Control
from gradientflow.exchange.native import Native

__all__ = ["Control", "Native"]
