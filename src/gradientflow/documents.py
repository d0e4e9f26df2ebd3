"""Files that people write or other programs read: versioned, checked, replaced whole.

A `Document` is a frozen pydantic model with a `version`. Reading a wrong file raises one line that names
the file, the field and what was expected. No more of a file is read than one of its kind can hold, and what is in
it is data: numbers, words and lists of them. Writing goes to a temporary file beside the target and is
renamed over it, so a crash leaves the previous file.
"""

from __future__ import annotations

import json
import os
import tempfile
import tomllib
from pathlib import Path
from typing import Any, ClassVar, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from gradientflow.errors import DocumentError

# Files larger than this are not ours, and what is read takes some twenty times as much memory: a full trace takes about
# 26 MB, results of a bench with timelines may take as much for each method.
MAX_NBYTES = 256 * 2**20
#: A plan of 10,000 tensors takes about 2 MB.
MAX_DOCUMENT_NBYTES = 32 * 2**20
#: Names within names of a TOML file: neither its reader nor what looks at the result has a limit of its own.
MOST_DEEP = 100
#: What is written by hand.
MAX_TOML_NBYTES = 2**20


Model = TypeVar("Model", bound=BaseModel)


class Record(BaseModel):
    """A frozen value inside a document; unknown fields are errors, not ignored."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Document(Record):
    """A record that is a whole file."""

    #: Longer files are not read.
    limit_nbytes: ClassVar[int] = MAX_DOCUMENT_NBYTES

    version: Literal[1] = 1

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Self:
        """What is in a file; a `DocumentError` names the field that is wrong, and what was expected."""
        return parse_json(cls, read_text(path, cls.limit_nbytes), str(path))

    def write(self, path: str | os.PathLike[str]) -> None:
        """Replace a file, whole or not at all."""
        write_text(path, self.model_dump_json(indent=1) + "\n")


def parse_json(model: type[Model], text: str, source: str) -> Model:
    """`text` as a `model`, or a `DocumentError` that names `source`, the field and what was expected."""
    try:
        return model.model_validate_json(text)
    except ValidationError as error:
        raise DocumentError(f"{source}: {describe(error)}") from None


def describe(error: ValidationError) -> str:
    """The first problem in words, and how many more there are.

    >>> class Port(Record):
    ...     number: int
    >>> try:
    ...     Port.model_validate({"number": "x"})
    ... except ValidationError as error:
    ...     print(describe(error))
    field number: input should be a valid integer, unable to parse string as an integer; found 'x'
    """
    problems = error.errors(include_url=False)
    first = problems[0]
    where = ".".join(str(part) for part in first["loc"])
    expected = first["msg"][:1].lower() + first["msg"][1:]
    found = " ".join(repr(first["input"]).split())  # a tensor's takes several lines
    if len(found) > 60:
        found = found[:57] + "..."
    words = f"field {where}: {expected}" if where else expected
    if first["type"] not in ("missing", "json_invalid"):
        words += f"; found {found}"
    if len(problems) > 1:
        words += f" (and {len(problems) - 1} more)"
    return words


def read_text(path: str | os.PathLike[str], limit_nbytes: int = MAX_NBYTES) -> str:
    """The text of a file, or a `DocumentError` that says why there is none."""
    try:
        with open(path, "rb") as file:  # a pipe or a device has no size before it is read
            content = file.read(limit_nbytes + 1)
    except OSError as error:
        raise DocumentError(f"{path}: {error.strerror or error}") from None
    except ValueError:
        raise DocumentError(f"{str(path)!r}: is no name of a file") from None
    if len(content) > limit_nbytes:
        raise DocumentError(f"{path}: more than the {limit_nbytes} bytes that a file of its kind can hold")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError:
        raise DocumentError(f"{path}: expected UTF-8 text") from None


def parse_data(text: str, source: str, kind: Literal["JSON", "TOML"]) -> Any:
    """What is written there, of whatever form, or a `DocumentError`.

    >>> parse_data("recipe = 'lazy'", "recipe.toml", "TOML")
    {'recipe': 'lazy'}
    """
    try:
        if kind == "TOML" and any(line.partition("=")[0].count(".") > MOST_DEEP for line in text.splitlines()):
            raise RecursionError
        return json.loads(text) if kind == "JSON" else tomllib.loads(text)
    except RecursionError:
        raise DocumentError(f"{source}: expected {kind}; found brackets or names within others without end") from None
    except ValueError as error:  # also of a number with thousands of digits
        raise DocumentError(f"{source}: expected {kind}; {error}") from None


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Replace `path` by `text` in one step: readers see the old file or the new one, never half."""
    target = check_writable(path)
    try:
        _replace(target, text)
    except OSError as error:
        raise DocumentError(f"{path}: cannot be written; {error.strerror or error}") from None


def check_writable(path: str | os.PathLike[str]) -> Path:
    """The file that `path` means, links followed, if it can be written; a `DocumentError` if not.

    Only files are replaced: root would turn a device into one."""
    target = Path(os.path.realpath(path))
    if target.exists() and not target.is_file():
        raise DocumentError(f"{path}: is no file that could be replaced")
    if not target.parent.is_dir():
        raise DocumentError(f"{path}: {target.parent} is no directory")
    if not os.access(target.parent, os.W_OK | os.X_OK):
        raise DocumentError(f"{path}: {target.parent} cannot be written to")
    return target


def _replace(target: Path, text: str) -> None:
    handle, temporary = tempfile.mkstemp(prefix=f".{target.name}-", dir=target.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        # mkstemp's 0600 would hide the file from the colleagues it is written for.
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(temporary, 0o666 & ~umask)
        os.replace(temporary, target)
    except BaseException:
        os.unlink(temporary)
        raise
