"""Plots that are not timelines, as plotly.js takes them: data and layout, nothing drawn yet."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from gradientflow.bench.report.page import BLACK, SERIES, Figure, Unit, hatching, plot_text, size, size_unit, time_unit

_GRID = "#d0d7de"
_DASHES = ("solid", "dot", "dash", "dashdot")
_SYMBOLS = ("circle", "square", "diamond", "triangle-up", "x", "cross", "star", "triangle-down")


class Part(NamedTuple):
    """One colour of stacked bars: a value for each bar."""

    name: str
    colour: str
    values: Sequence[float]
    hatched: bool = False


class Marks(NamedTuple):
    """A line across each bar."""

    name: str
    values: Sequence[float]


def stacked_bars(
    labels: Sequence[str],
    parts: Sequence[Part],
    spread: Sequence[tuple[float, float]],
    limits: Marks | None = None,
) -> Figure:
    """Lying bars of seconds, one under the other. `spread`: from where to where most of the whole bars lay."""
    totals = [sum(values) for values in zip(*(part.values for part in parts), strict=True)]
    unit = time_unit([*totals, *(high for _, high in spread)])
    # Numbers, not names, place the bars: names may be equal once cut, or look like numbers.
    places = list(range(len(labels)))
    data: list[dict[str, Any]] = [
        {
            "type": "bar",
            "orientation": "h",
            "name": part.name,
            "y": places,
            "x": [value / unit.size for value in part.values],
            "marker": {"color": part.colour, **({"pattern": hatching(part.colour)} if part.hatched else {})},
            "hovertext": [
                f"{plot_text(label)}: {part.name} {unit.of(v)}" for label, v in zip(labels, part.values, strict=True)
            ],
            "hoverinfo": "text",
        }
        for part in parts
    ]
    data.append(_spread(places, totals, spread, unit))
    if limits:
        data.append(_limits(places, limits, unit))
    return {
        "data": data,
        "layout": {
            "barmode": "stack",
            "bargap": 0.35,
            "height": 110 + 44 * len(labels),
            "margin": {"l": 10, "r": 16, "t": 48, "b": 48},
            "legend": {"orientation": "h", "x": 0, "y": 1, "yanchor": "bottom", "traceorder": "normal"},
            "hovermode": "closest",
            "xaxis": {"title": {"text": unit.long_name}, "rangemode": "tozero", "gridcolor": _GRID},
            "yaxis": {
                "tickvals": places,
                "ticktext": [plot_text(label) for label in labels],
                "range": [len(labels) - 0.5, -0.5],
                "fixedrange": True,
                "automargin": True,
                "zeroline": False,
                "showgrid": False,
            },
        },
    }


def _spread(
    places: Sequence[int], totals: Sequence[float], spread: Sequence[tuple[float, float]], unit: Unit
) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "markers",
        "name": "p10 to p90",
        "y": places,
        "x": [total / unit.size for total in totals],
        "error_x": {
            "type": "data",
            "symmetric": False,
            "array": [max(0.0, high - total) / unit.size for total, (_, high) in zip(totals, spread, strict=True)],
            "arrayminus": [max(0.0, total - low) / unit.size for total, (low, _) in zip(totals, spread, strict=True)],
            "color": BLACK,
            "thickness": 1.5,
        },
        "marker": {"color": BLACK, "size": 5},
        "hovertext": [f"p10 {unit.of(low)}, p90 {unit.of(high)}" for low, high in spread],
        "hoverinfo": "text",
    }


def _limits(places: Sequence[int], limits: Marks, unit: Unit) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "markers",
        "name": limits.name,
        "y": places,
        "x": [value / unit.size for value in limits.values],
        "marker": {"symbol": "line-ns-open", "size": 34, "color": BLACK, "line": {"width": 3, "color": BLACK}},
        "hovertext": [f"{limits.name} {unit.of(value)}" for value in limits.values],
        "hoverinfo": "text",
    }


class Line(NamedTuple):
    """Points (x, y), and how far below and above y most of them lay."""

    name: str
    points: Sequence[tuple[float, float]]
    around: Sequence[tuple[float, float]] = ()


def steps_plot(upper: Sequence[Line], lower: Sequence[Line], titles: tuple[str, str]) -> Figure:
    """Seconds over steps: two plots over each other, the same lines in both."""
    unit = time_unit(y for line in (*upper, *lower) for _, y in line.points)
    data = []
    for lines, axis in ((upper, "y"), (lower, "y2")):
        for number, line in enumerate(lines):
            data.append(
                {
                    "type": "scatter",
                    "mode": "lines" if len(line.points) > 1 else "markers",
                    "name": plot_text(line.name),
                    "legendgroup": str(number),
                    "showlegend": axis == "y",
                    "yaxis": axis,
                    "x": [x for x, _ in line.points],
                    "y": [round(y / unit.size, 6) for _, y in line.points],
                    "line": {"color": SERIES[number % len(SERIES)], "width": 2, "dash": _DASHES[number % len(_DASHES)]},
                    "hovertext": [f"{plot_text(line.name)}, step {x:.0f}: {unit.of(y)}" for x, y in line.points],
                    "hoverinfo": "text",
                }
            )
    return {
        "data": data,
        "layout": {
            "height": 460,
            "margin": {"l": 10, "r": 16, "t": 48, "b": 48},
            "legend": {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom"},
            "hovermode": "closest",
            "xaxis": {
                "title": {"text": "step"},
                "anchor": "y2",
                "gridcolor": _GRID,
                "zeroline": False,
                **_whole(max((len(line.points) for line in upper), default=0)),
            },
            "yaxis": _step_axis(f"{titles[0]}, {unit.name}", [0.54, 1.0]),
            "yaxis2": _step_axis(f"{titles[1]}, {unit.name}", [0.0, 0.46]),
        },
    }


def _whole(number: int) -> dict[str, int]:
    """An axis of a few whole numbers has no marks between them."""
    return {"dtick": 1} if number <= 12 else {}


def _step_axis(title: str, domain: list[float]) -> dict[str, Any]:
    return {
        "title": {"text": title},
        "domain": domain,
        "rangemode": "tozero",
        "gridcolor": _GRID,
        "zeroline": False,
        "automargin": True,
    }


def curves_plot(names: Sequence[str], lines: Sequence[Sequence[Line]], target: float, title: str) -> Figure:
    """Values over seconds: several lines for each name, in its colour, and a dotted one across at `target`."""
    data: list[dict[str, Any]] = []
    for number, (name, several) in enumerate(zip(names, lines, strict=True)):
        style = {"color": SERIES[number % len(SERIES)], "width": 2, "dash": _DASHES[number % len(_DASHES)]}
        for place, line in enumerate(several):
            data.append(
                {
                    "type": "scatter",
                    "mode": "lines" if len(line.points) > 1 else "markers",
                    "name": plot_text(name),
                    "legendgroup": str(number),
                    "showlegend": place == 0,
                    "x": [round(x, 3) for x, _ in line.points],
                    "y": [round(y, 4) for _, y in line.points],
                    "line": style,
                    "hovertext": [f"{plot_text(line.name)}, {x:.1f} s: {y:.3f}" for x, y in line.points],
                    "hoverinfo": "text",
                }
            )
    end_s = max((x for several in lines for line in several for x, _ in line.points), default=0.0)
    data.append(
        {
            "type": "scatter",
            "mode": "lines",
            "name": f"{target:.2f}",
            "x": [0, end_s],
            "y": [target, target],
            "line": {"color": BLACK, "width": 1, "dash": "dot"},
            "hoverinfo": "skip",
        }
    )
    return {
        "data": data,
        "layout": {
            "height": 440,
            "margin": {"l": 10, "r": 16, "t": 48, "b": 48},
            "legend": {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom"},
            "hovermode": "closest",
            "xaxis": {"title": {"text": "seconds"}, "rangemode": "tozero", "gridcolor": _GRID, "zeroline": False},
            "yaxis": {"title": {"text": plot_text(title)}, "gridcolor": _GRID, "zeroline": False, "automargin": True},
        },
    }


def sizes_plot(lines: Sequence[Line], fits: Sequence[Line]) -> Figure:
    """Seconds over bytes, both logarithmic: what was measured with its spread, and the fitted lines dashed."""
    data = []
    for number, (line, fit) in enumerate(zip(lines, fits, strict=True)):
        colour = SERIES[number % len(SERIES)]
        data.append(_measured(line, colour, _SYMBOLS[number % len(_SYMBOLS)], str(number)))
        data.append(
            {
                "type": "scatter",
                "mode": "lines",
                "name": plot_text(fit.name),
                "legendgroup": str(number),
                "showlegend": False,
                "x": [x for x, _ in fit.points],
                "y": [y for _, y in fit.points],
                "line": {"color": colour, "dash": "dash", "width": 1},
                "hoverinfo": "skip",
            }
        )
    # A number and an SI prefix: 10k, 1m.
    axis = {"type": "log", "gridcolor": _GRID, "zeroline": False, "dtick": 1, "tickformat": "~s"}
    return {
        "data": data,
        "layout": {
            "height": 480,
            "margin": {"l": 10, "r": 16, "t": 48, "b": 48},
            "legend": {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom"},
            "hovermode": "closest",
            "xaxis": {**axis, "title": {"text": "size"}, "ticksuffix": "B"},
            "yaxis": {**axis, "title": {"text": "time"}, "ticksuffix": "s", "automargin": True},
        },
    }


def _measured(line: Line, colour: str, symbol: str, group: str) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "name": plot_text(line.name),
        "legendgroup": group,
        "x": [x for x, _ in line.points],
        "y": [y for _, y in line.points],
        "error_y": {
            "type": "data",
            "symmetric": False,
            "array": [above for _, above in line.around],
            "arrayminus": [below for below, _ in line.around],
            "thickness": 1,
        },
        "line": {"color": colour, "width": 1.5},
        "marker": {"symbol": symbol, "size": 7},
        "hovertext": [f"{plot_text(line.name)}, {x:,.0f} B: {time_unit([y]).of(y)}" for x, y in line.points],
        "hoverinfo": "text",
    }


def message_sizes(lanes: Sequence[tuple[str, Sequence[tuple[int, float, str]]]]) -> Figure:
    """A bar a message in the plan's order, a colour a lane: (number, bytes, label) of each."""
    unit = size_unit(nbytes for _, messages in lanes for _, nbytes, _ in messages)
    total = sum(len(messages) for _, messages in lanes)
    data = [
        {
            "type": "bar",
            "name": plot_text(lane),
            "x": [number for number, _, _ in messages],
            "y": [nbytes / unit.size for _, nbytes, _ in messages],
            "width": 0.8,
            "marker": {"color": SERIES[index % len(SERIES)]},
            "hovertext": [f"message {number}, {plot_text(label)}: {size(n)}" for number, n, label in messages],
            "hoverinfo": "text",
        }
        for index, (lane, messages) in enumerate(lanes)
    ]
    return {
        "data": data,
        "layout": {
            "barmode": "overlay",
            "height": 320,
            "margin": {"l": 10, "r": 16, "t": 48, "b": 48},
            "showlegend": True,
            "legend": {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom"},
            "hovermode": "closest",
            "xaxis": {
                "title": {"text": "message, in the order of the plan"},
                "range": [-0.5, total - 0.5],
                **_whole(total),
            },
            "yaxis": {"title": {"text": unit.name}, "rangemode": "tozero", "gridcolor": _GRID, "automargin": True},
        },
    }
