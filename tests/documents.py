"""What documents hold beside prose: Python that can be run, and commands as a reader would type them."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])

_FENCE = re.compile(r"(?:<!-- needs: (\w+) -->\n)?^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
#: A line of a block that is indented instead of fenced.
_INDENTED = re.compile(r"^    .*\S.*$", re.MULTILINE)
PROGRAMS = {"gradientflow", "torchrun", "make", "pip", "python", "mpirun", "kubectl", "sbatch"}


class Block(NamedTuple):
    text: str
    #: A package without which it cannot be run, or "".
    needs: str


def python_blocks(page: Path) -> list[Block]:
    return [
        Block(text, needs or "") for needs, language, text in _FENCE.findall(page.read_text()) if language == "python"
    ]


class Command(NamedTuple):
    """Its words, without what is set before it, comments and "..." for what is left out; N is some number."""

    words: list[str]
    #: Within a sentence, where it may be named by its first words.
    mentioned: bool


def commands(page: Path) -> list[Command]:
    text = page.read_text()
    shell = [block for _, language, block in _FENCE.findall(text) if language in ("sh", "bash", "console")]
    prose = _FENCE.sub("", text)
    lines = "\n".join([*_INDENTED.findall(prose), *shell]).replace("\\\n", " ").splitlines()
    inline = [words for words in re.findall(r"`([^`\n]+)`", prose) if words.split()[0] in PROGRAMS and " " in words]
    found = []
    for line, mentioned in [*((line, False) for line in lines), *((words, True) for words in inline)]:
        try:
            words = shlex.split(line.strip(), comments=True)
        except ValueError:  # prose with an apostrophe
            continue
        while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
            words = words[1:]
        words = ["0" if word == "N" else word for word in words if word not in ("...", "[...]")]
        if words and (words[0] in PROGRAMS or words[0].startswith("examples/")):
            found.append(Command(words, mentioned))
    return found
