"""Exchanges: how a question of a codec is answered by the group."""

from gradientflow.exchange.control import Control
from gradientflow.exchange.health import Health
from gradientflow.exchange.native import Moment, Native, Stamp

__all__ = ["Control", "Health", "Moment", "Native", "Stamp"]
