"""One self-contained page about a bake-off, to send to a colleague: it opens without a network."""

from __future__ import annotations

import html
import importlib.util
from collections.abc import Iterable

from gradientflow.bench.results import Result, Results, Timeline
from gradientflow.documents import write_text
from gradientflow.errors import UsageError

_COLOURS = {"forward": "#8fbcd4", "backward": "#3f7fa6", "message": "#d98c3f", "exposed": "#b3403a", "step": "#c8ccd0"}
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem; color: #222; }
table { border-collapse: collapse; } th, td { padding: .25rem .7rem; text-align: right; border-bottom: 1px solid #ddd; }
th:first-child, td:first-child { text-align: left; } .note { background: #fff4d6; padding: .5rem .8rem; }
details { margin: 1rem 0; } summary { cursor: pointer; } code { font-size: 90%; }
"""


def write_report(results: Results, path: str) -> None:
    """Write the page to `path`."""
    if importlib.util.find_spec("plotly") is None:
        raise UsageError("the report needs plotly: pip install 'gradientflow[report]'")
    write_text(path, page(results))


def page(results: Results) -> str:
    from plotly.offline import get_plotlyjs

    first = results.results[0]
    title = f"{first.workload}: {len(results.results)} methods on {first.hosts} workers"
    notes = "".join(f'<p class="note">{html.escape(note)}</p>' for note in results.notes)
    timelines = "".join(_timeline(timeline) for timeline in results.timelines)
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f'<link rel="icon" href="data:,"><style>{_STYLE}</style><script>{get_plotlyjs()}</script></head><body>'
        f"<h1>{html.escape(title)}</h1><p>{html.escape(results.network)}; {html.escape(results.started)}</p>{notes}"
        f"<h2>Iteration time against the limit</h2>{_bars(results)}{_table(results.results)}"
        f"<h2>One iteration, on rank 0</h2>{timelines or '<p>No timelines were recorded.</p>'}"
        f"<h2>How it was measured</h2>{_machine(results)}</body></html>"
    )


def _bars(results: Results) -> str:
    import plotly.graph_objects as go

    rows = results.results
    names = [row.method for row in rows]
    figure = go.Figure()
    figure.add_bar(x=names, y=[row.compute_s for row in rows], name="compute", marker_color=_COLOURS["backward"])
    exposed = [max(0.0, row.exposed_s) for row in rows]
    spread = [row.iteration_s.p90 - row.iteration_s.median for row in rows]
    below = [row.iteration_s.median - row.iteration_s.p10 for row in rows]
    error = {"type": "data", "array": spread, "arrayminus": below}
    figure.add_bar(x=names, y=exposed, name="exposed", marker_color=_COLOURS["exposed"], error_y=error)
    limits = [row.limit_s for row in rows]
    figure.add_scatter(x=names, y=limits, name="limit of the method", mode="markers", marker_symbol="line-ew-open",
                       marker_size=40, marker_color="#222")  # fmt: skip
    figure.update_layout(barmode="stack", yaxis_title="seconds", template="plotly_white", height=420)
    return _embed(figure, "bars")


def _timeline(timeline: Timeline) -> str:
    import plotly.graph_objects as go

    figure = go.Figure()
    for kind in dict.fromkeys(span.kind for span in timeline.spans):
        spans = [span for span in timeline.spans if span.kind == kind]
        figure.add_bar(
            y=[span.track for span in spans],
            x=[span.end_s - span.start_s for span in spans],
            base=[span.start_s for span in spans],
            hovertext=[f"{span.name}, {1e3 * (span.end_s - span.start_s):.1f} ms" for span in spans],
            name=kind,
            orientation="h",
            marker_color=_COLOURS.get(kind, "#888"),
        )
    figure.update_layout(
        barmode="overlay", xaxis_title="seconds", template="plotly_white", height=260, title=timeline.method
    )
    return _embed(figure, f"timeline-{timeline.method}")


def _embed(figure: object, name: str) -> str:
    text: str = figure.to_html(full_html=False, include_plotlyjs=False, div_id=name)  # type: ignore[attr-defined]
    return text


def _table(rows: Iterable[Result]) -> str:
    rows = list(rows)
    base = next((row.method for row in rows if row.method.startswith("ddp")), rows[-1].method)
    heads = ["method", "iteration", f"to {base}", "95 % interval", "limit", "exposed", "sent", "CPU", "notes"]
    lines = ["<tr>" + "".join(f"<th>{html.escape(head)}</th>" for head in heads) + "</tr>"]
    for row in rows:
        ratio = row.ratio_to.get(base)
        cells = [
            row.method,
            f"{row.iteration_s.median:.3f} s",
            f"{ratio.median:.3f}" if ratio else "",
            f"{ratio.low:.3f} to {ratio.high:.3f}" if ratio else "",
            f"{row.limit_s:.3f} s",
            f"{row.exposed_s:.3f} s",
            f"{row.bytes_sent / 1e6:.1f} MB",
            f"{row.cpu_share:.0%}",
            ", ".join(row.notes),
        ]
        lines.append("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in cells) + "</tr>")
    return f"<table>{''.join(lines)}</table>"


def _machine(results: Results) -> str:
    facts = {"command": results.command, **results.machine.model_dump()}
    items = "".join(
        f"<li>{html.escape(key)}: <code>{html.escape(str(value))}</code></li>" for key, value in facts.items()
    )
    return (
        "<p>Methods take turns, block by block, in one job; ratios are taken between blocks that ran next to each "
        "other, and the interval holds the true median in 95 of 100 experiments.</p>"
        f"<details open><summary>Machine and versions</summary><ul>{items}</ul></details>"
    )
