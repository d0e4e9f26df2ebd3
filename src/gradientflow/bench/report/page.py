"""How a page is put together: text, tables, plots, and the document around them.

What comes from a file may be anything, also `</script>`. `text` makes it harmless in HTML, `plot_text` in the labels
of a plot, where plotly reads a few tags of its own, and `Page` in the block of JSON that the plots are drawn from. A
content security policy names the page's two scripts by their hashes: no other would run, and nothing is fetched.
"""

from __future__ import annotations

import base64
import hashlib
import html
import importlib.util
import json
import math
import os
from collections.abc import Collection, Iterable, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from gradientflow.documents import write_text
from gradientflow.errors import UsageError

#: A plot as plotly.js takes it: data, layout, and for one with a choice the data of each.
Figure = dict[str, Any]

#: Colours of Okabe and Ito, which people of all colour visions can tell apart.
BLACK, GREY = "#222222", "#999999"
SKY, BLUE, ORANGE, VERMILLION, GREEN, PURPLE = "#56B4E9", "#0072B2", "#E69F00", "#D55E00", "#009E73", "#CC79A7"
SERIES = (BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY, BLACK, GREY)

MAX_LABEL = 80


def hatching(colour: str) -> dict[str, object]:
    """White lines over a colour, for those who see none, and on paper."""
    return {"shape": "/", "bgcolor": colour, "fgcolor": "white", "size": 7, "solidity": 0.2}


def text(value: object) -> str:
    """For HTML, in elements and in attributes.

    >>> text('a < b & "c"')
    'a &lt; b &amp; &quot;c&quot;'
    """
    return html.escape(str(value))


def plot_text(value: object) -> str:
    """For plotly, which reads tags and entities in labels; what is longer than a label is cut.

    >>> plot_text("</script>")
    '&lt;/script&gt;'
    """
    words = str(value)
    return html.escape(words if len(words) <= MAX_LABEL else words[: MAX_LABEL - 1] + "…", quote=False)


# - Units


class Unit(NamedTuple):
    """Seconds, bytes or the like for people, the same unit down a column."""

    name: str
    size: float
    decimals: int = 1

    @property
    def long_name(self) -> str:
        return {"s": "seconds", "ms": "milliseconds"}.get(self.name, self.name)

    def of(self, value: float) -> str:
        return f"{value / self.size:,.{self.decimals}f} {self.name}"

    def between(self, low: float, high: float) -> str:
        """
        >>> Unit("ms", 1e-3).between(0.0123, 0.4)
        '12.3 to 400.0 ms'
        """
        return f"{low / self.size:,.{self.decimals}f} to {self.of(high)}"


def time_unit(values_s: Iterable[float]) -> Unit:
    """
    >>> time_unit([0.0123, 0.4]).of(0.0123)
    '12.3 ms'
    """
    most_s = max((abs(value_s) for value_s in values_s if math.isfinite(value_s)), default=0.0)
    if most_s >= 1.0:
        return Unit("s", 1.0, 3)
    return Unit("ms", 1e-3, 1 if most_s >= 0.01 else 3)


def seconds(value_s: float) -> str:
    """One time by itself.

    >>> seconds(0.0000421)
    '42.1 µs'
    """
    return Unit("µs", 1e-6).of(value_s) if abs(value_s) < 1e-3 else time_unit([value_s]).of(value_s)


def size(nbytes: float) -> str:
    """
    >>> size(640), size(98_500_000)
    ('640 B', '98.5 MB')
    """
    return size_unit([nbytes]).of(nbytes)


def size_unit(nbytes: Iterable[float]) -> Unit:
    most = max(nbytes, default=0)
    return Unit("MB", 1e6) if most >= 1e6 else Unit("kB", 1e3) if most >= 1e3 else Unit("B", 1.0, 0)


def rate(bits_s: float) -> str:
    """
    >>> rate(941e6)
    '941 Mbit/s'
    """
    return (
        Unit("Gbit/s", 1e9, 2).of(bits_s)
        if bits_s >= 1e9
        else Unit("Mbit/s", 1e6, 0 if bits_s >= 1e8 else 1).of(bits_s)
    )


def count(number: int, thing: str) -> str:
    """
    >>> count(1, "lane"), count(1200, "message")
    ('1 lane', '1,200 messages')
    """
    return f"{number:,} {thing}{'' if number == 1 else 's'}"


# - Pieces


def paragraph(words: str) -> str:
    return f"<p>{text(words)}</p>"


def notes(several: Iterable[str]) -> str:
    """What must not be overlooked."""
    return "".join(f'<p class="note"><strong>Note:</strong> {text(note)}</p>' for note in several)


def code_block(words: str) -> str:
    return f'<pre tabindex="0"><code>{text(words)}</code></pre>'


def facts(pairs: Iterable[tuple[str, object]]) -> str:
    """Names and values."""
    return f"<dl>{''.join(f'<dt>{text(name)}</dt><dd>{text(value)}</dd>' for name, value in pairs)}</dl>"


def details(summary: str, inside: str) -> str:
    return f"<details><summary>{text(summary)}</summary>{inside}</details>"


class Row(NamedTuple):
    """Cells of a table; a pair has a small second line. The first names the row; a mark stands beside its name."""

    cells: Sequence[str | tuple[str, str]]
    mark: str = ""


def table(caption: str, heads: Sequence[str], rows: Iterable[Row], words: Collection[int] = ()) -> str:
    """Numbers stand right, the first column and those in `words` left."""
    kinds = ["word" if number in {0, *words} else "number" for number in range(len(heads))]
    top = "".join(f'<th scope="col" class="{kind}">{text(head)}</th>' for kind, head in zip(kinds, heads, strict=True))
    return (
        f'<div class="scroll" role="region" aria-label="{text(caption)}" tabindex="0"><table>'
        f"<caption>{text(caption)}</caption><thead><tr>{top}</tr></thead>"
        f"<tbody>{''.join(_row(row, kinds) for row in rows)}</tbody></table></div>"
    )


def _row(row: Row, kinds: Sequence[str]) -> str:
    mark = f' <strong class="mark">{text(row.mark)}</strong>' if row.mark else ""
    first = f'<th scope="row" class="word">{_cell(row.cells[0])}{mark}</th>'
    rest = "".join(
        f'<td class="{kind}">{_cell(cell)}</td>' for kind, cell in zip(kinds[1:], row.cells[1:], strict=True)
    )
    return f"<tr{' class=marked' if row.mark else ''}>{first}{rest}</tr>"


def _cell(cell: str | tuple[str, str]) -> str:
    return text(cell) if isinstance(cell, str) else f"{text(cell[0])}<small>{text(cell[1])}</small>"


def trace_link(trace: Path, page: Path, words: str) -> str:
    """A link that holds as long as the two files lie to each other as they do now."""
    target = quote(os.path.relpath(trace.absolute(), page.absolute().parent))
    return (
        f'<p><a href="{text(target)}">{text(trace.name)}</a>: {text(words)} Open it in '
        '<a href="https://ui.perfetto.dev">ui.perfetto.dev</a>, which keeps it on your machine.</p>'
    )


# - The document


class Page:
    """Collects pieces and plots, in order."""

    def __init__(self, title: str, subtitle: str) -> None:
        self._title = title
        self._pieces = [f"<header><h1>{text(title)}</h1>{paragraph(subtitle)}</header><main>"]
        self._figures: dict[str, Figure] = {}

    def add(self, *pieces: str) -> None:
        self._pieces += pieces

    def section(self, heading: str, *pieces: str) -> None:
        self.add(f"<h2>{text(heading)}</h2>", *pieces)

    def plot(self, name: str, figure: Figure, caption: str, choice: tuple[str, Sequence[str]] | None = None) -> str:
        """A place for a plot. `choice`: what is chosen by a menu, and among what; `figure["choices"]` has the data."""
        assert name not in self._figures
        self._figures[name] = figure
        menu = ""
        if choice:
            options = "".join(
                f'<option value="{number}">{text(label)}</option>' for number, label in enumerate(choice[1])
            )
            menu = (
                f'<p class="choice"><label for="{name}-choice">{text(choice[0])}</label> '
                f'<select id="{name}-choice" data-plot="{name}">{options}</select></p>'
            )
        height = figure["layout"]["height"]
        return (
            f'{menu}<figure><div id="{name}" class="plot" role="group" aria-label="{text(caption)}" '
            f'style="min-height:{height}px"></div><figcaption>{text(caption)}</figcaption></figure>'
        )

    def html(self) -> str:
        from plotly.offline import get_plotlyjs

        here = files(__package__)
        # The browser hashes what it has parsed, and parsing makes \r\n to \n.
        library = get_plotlyjs().replace("\r\n", "\n")
        script = here.joinpath("page.js").read_text(encoding="utf-8")
        policy = (
            f"default-src 'none'; script-src {_hash(library)} {_hash(script)}; style-src 'unsafe-inline'; "
            "img-src data: blob:; base-uri 'none'; form-action 'none'"
        )
        whole = (
            '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
            '<meta name="viewport" content="width=device-width, initial-scale=1">'
            f'<title>{text(self._title)}</title><link rel="icon" href="data:,">'
            f"<style>{here.joinpath('page.css').read_text(encoding='utf-8')}</style></head><body>"
            f"{''.join(self._pieces)}</main>"
            f'<script type="application/json" id="figures">{_json(self._figures)}</script>'
            f"<script>{library}</script><script>{script}</script></body></html>\n"
        )
        # Half a surrogate pair is no text, but JSON can hold one.
        return whole.encode("utf-8", "replace").decode("utf-8")


def need_plotly() -> None:
    if importlib.util.find_spec("plotly") is None:
        raise UsageError("a report needs plotly: pip install 'gradientflow[report]'")


def write_page(page: Page, path: Path) -> None:
    write_text(path, page.html())


def _hash(script: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


def _json(value: object) -> str:
    """JSON that cannot end the element it stands in."""
    found = json.dumps(_finite(value), allow_nan=False, separators=(",", ":"))
    return found.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _finite(value: Any) -> Any:
    """JSON knows no NaN; plotly leaves out what is null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return value
