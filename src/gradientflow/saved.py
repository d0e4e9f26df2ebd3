"""What was saved, read with care: a state comes from a file, which may be anybody's."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from gradientflow.errors import GradientFlowError, UsageError

#: Steps, rounds, samples: more than anybody takes, and little enough to be counted on.
MOST = 2**53


@contextlib.contextmanager
def reading(what: str) -> Iterator[None]:
    """What goes wrong inside because of what is there is a `UsageError`: the state is not what `state_dict()` gave."""
    try:
        yield
    except GradientFlowError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, RuntimeError, OverflowError) as error:
        words = str(error).partition("\n")[0][:120]
        raise UsageError(f"{what} is not what state_dict() gave: {type(error).__name__}, {words}") from error


def count(state: Mapping[str, Any], key: str) -> int:
    """A number of something.

    >>> count({"step": 3}, "step")
    3
    """
    found = state.get(key)
    if isinstance(found, bool) or not isinstance(found, int) or not 0 <= found <= MOST:
        raise UsageError(f"the state has {found!r:.40} as {key}: it is not what state_dict() gave")
    return found
