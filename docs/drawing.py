"""A few strokes of SVG: enough for bars over time, bars of a size, circles and arrows.

Coordinates are rounded, so that a picture of the same data is the same file.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

WIDTH = 760
#: As in the report: told apart by those who do not see all colours.
SKY, BLUE, GREEN, ORANGE, VERMILLION, PURPLE, GREY, INK = (
    "#56b4e9", "#0072b2", "#009e73", "#e69f00", "#d55e00", "#cc79a7", "#d0d7de", "#1f2328",
)  # fmt: skip
FAINT = "#57606a"


class Picture:
    """`title` is read out to those who do not see it."""

    def __init__(self, title: str, height: float) -> None:
        self._title, self._height = title, height
        self._parts: list[str] = []

    def __str__(self) -> str:
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {self._height:g}" role="img" '
            'font-family="system-ui, DejaVu Sans, sans-serif" font-size="13">'
        )
        arrow = (
            '<defs><marker id="to" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
            '<path d="M0 0 8 4 0 8z" fill="context-stroke"/></marker></defs>'
        )
        ground = f'<rect width="{WIDTH}" height="{self._height:g}" fill="#fff"/>'
        return "\n".join([head, f"<title>{escape(self._title)}</title>", arrow, ground, *self._parts, "</svg>", ""])

    def bar(self, x: float, y: float, width: float, height: float, colour: str, says: str = "", edge: str = "") -> None:
        """`says` appears under the pointer."""
        edge = f' stroke="{edge}"' if edge else ' stroke="#fff" stroke-width="0.7"'
        inside = f"<title>{escape(says)}</title>" if says else ""
        self._parts.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 0.5):.1f}" height="{height:.1f}" fill="{colour}"{edge}>'
            f"{inside}</rect>"
        )

    def text(self, x: float, y: float, words: str, *, anchor: str = "start", colour: str = INK, bold: bool = False,
             size: int = 13) -> None:  # fmt: skip
        weight = ' font-weight="600"' if bold else ""
        self._parts.append(
            f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}" font-size="{size}"{weight}>'
            f"{escape(words)}</text>"
        )

    def line(self, points: Sequence[tuple[float, float]], colour: str = FAINT, *, width: float = 1.2,
             dashed: bool = False, arrow: bool = False) -> None:  # fmt: skip
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        style = ' stroke-dasharray="5 4"' if dashed else ""
        style += ' marker-end="url(#to)"' if arrow else ""
        self._parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{width:g}"{style}/>')

    def dot(self, x: float, y: float, radius: float, colour: str, words: str = "", ink: str = "#fff") -> None:
        self._parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:g}" fill="{colour}"/>')
        if words:
            self.text(x, y + 4.5, words, anchor="middle", colour=ink, bold=True)

    def legend(self, y: float, entries: Iterable[tuple[str, str]], x: float = 10) -> None:
        """entries: colour, words."""
        for colour, words in entries:
            self.bar(x, y - 10, 12, 12, colour)
            self.text(x + 17, y, words, colour=FAINT)
            x += 34 + 6.6 * len(words)


def shortened(words: str, room: float) -> str:
    """As much of it as fits, in a script of 13 pixels.

    >>> shortened("layer4.weight", 60)
    'layer4.…'
    """
    fits = int(room / 7.2)
    return words if len(words) <= fits else words[: max(0, fits - 1)] + "…" if fits > 2 else ""
