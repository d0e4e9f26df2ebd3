"""Exchanges: how a question of a codec is answered by the group."""

from gradientflow.exchange.control import Control
from gradientflow.exchange.exchange import Exchange, Moment, Stamp, drive
from gradientflow.exchange.health import Health

__all__ = ["Control", "Exchange", "Health", "Moment", "Stamp", "drive"]
