"""For the reference: our docstrings as Markdown. A griffe extension.

Lines such as `recipe: how gradients travel` become a list, examples become blocks of code, and comments `#:` above a
field become its description.
"""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from typing import Any

import griffe

_ARGUMENT = re.compile(r"(\w+): (.+)", re.DOTALL)


class Plainly(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is None and isinstance(obj, griffe.Attribute):
            words = _comment_above(obj)
            if words:
                obj.docstring = griffe.Docstring(words, parent=obj)
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value, _arguments(obj))


def as_markdown(docstring: str, arguments: set[str]) -> str:
    """
    >>> print(as_markdown("Sends.\\n\\nto: whom,\\n    by rank\\n\\n>>> send(1)\\n2", {"to"}))
    Sends.
    <BLANKLINE>
    - `to`: whom, by rank
    <BLANKLINE>
    ```pycon
    >>> send(1)
    2
    ```
    """
    blocks = [_block(block, arguments) for block in re.split(r"\n\s*\n", docstring.strip("\n"))]
    return re.sub(r"\n```\n\n```pycon\n", "\n", "\n\n".join(blocks))


def _block(block: str, arguments: set[str]) -> str:
    if block.startswith(">>>"):
        return f"```pycon\n{block}\n```"
    found: list[str] = []
    for line in block.splitlines():
        matched = _ARGUMENT.match(line)
        if matched and matched[1] in arguments:
            found.append(f"- `{matched[1]}`: {matched[2]}")
        elif found and found[-1].startswith("- `") and line.startswith("    "):
            found[-1] += f" {line.strip()}"
        else:
            found.append(line)
    first = next((number for number, line in enumerate(found) if line.startswith("- `")), 0)
    if first:  # a list begins behind an empty line
        found.insert(first, "")
    return "\n".join(found)


def _arguments(obj: griffe.Object) -> set[str]:
    function = obj.members.get("__init__") if isinstance(obj, griffe.Class) else obj
    return {each.name.lstrip("*") for each in function.parameters} if isinstance(function, griffe.Function) else set()


def _comment_above(field: griffe.Attribute) -> str:
    if field.lineno is None or not isinstance(field.filepath, Path):
        return ""
    lines = field.lines_collection[field.filepath][: field.lineno - 1]
    found: list[str] = []
    while lines and lines[-1].strip().startswith("#:"):
        found.insert(0, lines.pop().strip().removeprefix("#:"))
    return textwrap.dedent("\n".join(found)).strip()
