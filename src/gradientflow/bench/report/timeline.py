"""Spans as bars over one time axis: a group of rows for each method, or for each rank.

The groups share the axis, so that their lengths compare. A menu chooses among several sets of the same groups.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from gradientflow.bench.report.page import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PURPLE,
    SKY,
    VERMILLION,
    Figure,
    Unit,
    hatching,
    plot_text,
    seconds,
    size,
    time_unit,
)
from gradientflow.trace import Span

#: Of one group; the longest are kept, others would be thinner than a hair.
GROUP_SPANS = 1_000

_COLOURS = {
    "step": GREY,
    "forward": SKY,
    "backward": BLUE,
    "optimizer": GREEN,
    "update": PURPLE,
    "message": ORANGE,
    "exposed": VERMILLION,
}
_ROWS = {
    "step": "iteration",
    "forward": "compute",
    "backward": "compute",
    "optimizer": "compute",
    "update": "compute",
    "exposed": "exposed",
}
_NAMES = {"step": "iteration"}
#: Heights in pixels.
_ROW, _TITLE, _LEGEND, _AXIS = 22, 26, 48, 48


class Group(NamedTuple):
    label: str
    spans: Sequence[Span]


def timeline(sets: Sequence[Sequence[Group]]) -> Figure:
    """A plot with one of `sets` at a time. All of them hold groups of the same labels in the same order.

    The groups of a set share the axis; a set has its own, since a slow one would leave the others no room."""
    sets = [[group._replace(spans=[s for s in group.spans if s.kind in _COLOURS]) for group in one] for one in sets]
    groups = [_Rows(label=group[0].label, names=_rows(group)) for group in zip(*sets, strict=True)]
    unit = time_unit(span.end_s for one in sets for group in one for span in group.spans)
    kinds = [
        kind for kind in _COLOURS if any(span.kind == kind for one in sets for group in one for span in group.spans)
    ]
    return {
        "choices": [[*_legend(kinds), *_bars(one, kinds, unit)] for one in sets],
        "ranges": [_range(one, unit) for one in sets],
        "layout": _layout(groups, unit),
    }


class _Rows(NamedTuple):
    label: str
    names: list[str]

    @property
    def height(self) -> int:
        return _TITLE + _ROW * len(self.names)


def _row(span: Span) -> str:
    return _ROWS.get(span.kind, span.track)


def _rows(groups: Iterable[Group]) -> list[str]:
    """The iteration, compute, the lanes in order, what was exposed."""
    tracks = {_row(span) for group in groups for span in group.spans}
    lanes = sorted(tracks - set(_ROWS.values()), key=lambda track: (len(track), track))
    return [name for name in ("iteration", "compute", *lanes, "exposed") if name in tracks | {"compute", "exposed"}]


def _legend(kinds: Sequence[str]) -> list[dict[str, Any]]:
    """Entries of their own: a group may have no span of a kind, and then plotly would show no entry."""
    return [
        {
            "type": "bar",
            "name": _NAMES.get(kind, kind),
            "legendgroup": kind,
            "x": [None],
            "y": [None],
            "marker": _marker(kind),
        }
        for kind in kinds
    ]


def _bars(groups: Sequence[Group], kinds: Sequence[str], unit: Unit) -> list[dict[str, Any]]:
    """A trace a kind and group, empty ones too: a menu then changes data and nothing else."""
    found: list[dict[str, Any]] = []
    for number, group in enumerate(groups):
        spans = _longest(group.spans)
        for kind in kinds:
            chosen = [span for span in spans if span.kind == kind]
            found.append(
                {
                    "type": "bar",
                    "orientation": "h",
                    "name": _NAMES.get(kind, kind),
                    "legendgroup": kind,
                    "showlegend": False,
                    "yaxis": _axis("y", number),
                    "y": [plot_text(_row(span)) for span in chosen],
                    "x": [_shown(span.duration_s, unit) for span in chosen],
                    "base": [_shown(span.start_s, unit) for span in chosen],
                    "hovertext": [_words(span) for span in chosen],
                    "hoverinfo": "text",
                    "marker": _marker(kind),
                    "width": 0.8,
                }
            )
    return found


def _marker(kind: str) -> dict[str, Any]:
    marker: dict[str, Any] = {"color": _COLOURS[kind], "line": {"color": "white", "width": 0.5}}
    if kind == "exposed":
        marker["pattern"] = hatching(VERMILLION)
    if kind == "message":
        marker["opacity"] = 0.75  # several may be under way at once
    return marker


def _longest(spans: Sequence[Span]) -> list[Span]:
    if len(spans) <= GROUP_SPANS:
        return list(spans)
    kept = set(sorted(range(len(spans)), key=lambda number: -spans[number].duration_s)[:GROUP_SPANS])
    return [span for number, span in enumerate(spans) if number in kept]


def _shown(value_s: float, unit: Unit) -> float:
    return round(value_s / unit.size, 6)


def _words(span: Span) -> str:
    words = [span.name, seconds(span.duration_s)]
    if "nbytes" in span.args:
        words.append(size(span.args["nbytes"]))
    if "waited_s" in span.args:
        words.append(f"ready {seconds(span.args['waited_s'])} before its lane")
    return plot_text(", ".join(words))


def _axis(letter: str, number: int) -> str:
    return letter if number == 0 else f"{letter}{number + 1}"


def _range(groups: Sequence[Group], unit: Unit) -> list[float]:
    spans = [span for group in groups for span in group.spans]
    first_s, last_s = min((s.start_s for s in spans), default=0.0), max((s.end_s for s in spans), default=1.0)
    return [min(0.0, first_s / unit.size), 1.02 * last_s / unit.size]


def _layout(groups: Sequence[_Rows], unit: Unit) -> dict[str, Any]:
    inside = sum(group.height for group in groups) or _ROW
    layout: dict[str, Any] = {
        "barmode": "overlay",
        "height": inside + _LEGEND + _AXIS,
        "margin": {"l": 10, "r": 16, "t": _LEGEND, "b": _AXIS},
        "legend": {"orientation": "h", "x": 0, "y": 1, "yanchor": "bottom", "traceorder": "normal"},
        "xaxis": {
            "title": {"text": unit.long_name},
            "anchor": _axis("y", len(groups) - 1),
            "gridcolor": "#d0d7de",
            "zeroline": False,
        },
        "annotations": [],
        "hovermode": "closest",
        "uirevision": "kept",
        "plot_bgcolor": "#f6f8fa",
    }
    top = inside
    for number, group in enumerate(groups):
        bottom = top - group.height
        layout[f"yaxis{number + 1 if number else ''}"] = {
            "domain": [bottom / inside, (top - _TITLE) / inside],
            "type": "category",
            "categoryorder": "array",
            "categoryarray": [plot_text(name) for name in reversed(group.names)],
            "range": [-0.5, len(group.names) - 0.5],
            "fixedrange": True,
            "automargin": True,
        }
        layout["annotations"].append(
            {
                "text": f"<b>{plot_text(group.label)}</b>",
                "xref": "paper",
                "yref": "paper",
                "x": 0,
                "y": (top - _TITLE) / inside,
                "xanchor": "left",
                "yanchor": "bottom",
                "showarrow": False,
            }
        )
        top = bottom
    return layout
