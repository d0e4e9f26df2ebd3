"""What an exchange asks of those who carry messages for it."""

from __future__ import annotations

from typing import Protocol


class TimeIsUp(Exception):
    """An operation's own limit is over."""


class Pending(Protocol):
    """An operation that was begun."""

    def done_within(self, patience_s: float | None) -> bool:
        """Wait for it, at most so long; whether it is done. Raises `ConnectionError` if it failed, `TimeIsUp` if that
        was because its own time was over. It may be asked again."""
