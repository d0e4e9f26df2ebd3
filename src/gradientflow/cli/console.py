"""How commands speak: errors as one line on stderr, seconds and bytes in units for people."""

from __future__ import annotations

import sys


def complain(text: str) -> None:
    print(f"gradientflow: {text}", file=sys.stderr)


def milliseconds(seconds: float) -> str:
    """
    >>> milliseconds(0.01234)
    '12.3 ms'
    """
    return f"{seconds * 1e3:.1f} ms"


def megabytes(nbytes: float) -> str:
    """
    >>> megabytes(3_751_000), megabytes(420)
    ('3.75 MB', '0.00 MB')
    """
    return f"{nbytes / 1e6:.2f} MB"
