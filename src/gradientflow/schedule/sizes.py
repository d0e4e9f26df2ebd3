"""Sizes as people write them in a recipe."""

from __future__ import annotations

import re

from gradientflow.errors import RecipeError

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def parse_nbytes(text: str) -> int:
    """Bytes.

    >>> parse_nbytes("4MB"), parse_nbytes("64KiB"), parse_nbytes("0.5MB")
    (4000000, 65536, 500000)
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([A-Za-z]*)", text)
    unit = _UNITS.get(match.group(2).upper()) if match else None
    if match is None or unit is None:
        raise RecipeError(f"cannot read size {text!r}: write a number and a unit, such as 4MB or 64KiB")
    return round(float(match.group(1)) * unit)
