"""Reports as pages that need nothing else."""

from __future__ import annotations

import html
from collections.abc import Sequence

from gradientflow.sim.predict import Prediction

STYLE = "body{font:14px/1.4 sans-serif;margin:2em;max-width:110em}pre{font:13px/1.35 monospace}"


def page(title: str, lines: Sequence[str]) -> str:
    body = html.escape("\n".join(lines))
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{html.escape(title)}</title><style>{STYLE}</style>"
        f"<h1>{html.escape(title)}</h1><pre>{body}</pre></html>\n"
    )


#: (bits per second, workers, prediction)
Row = tuple[float | None, int, Prediction]
COLOURS = ("#cfe8cf", "#cfdcf2", "#f6e3c5", "#ecd3ea", "#d9d9d9", "#f3cfcf", "#cdeef0", "#efefb8")


def winners_page(workload: str, cluster: str, rows: Sequence[Row]) -> str:
    """Rates down, workers across: the fastest recipe of each place, in a colour of its own."""
    worlds = list(dict.fromkeys(world for _, world, _ in rows))
    rates = list(dict.fromkeys(rate for rate, _, _ in rows))
    recipes = list(dict.fromkeys(one.recipe for _, _, one in rows))
    body = "".join(f"<th>{world} workers</th>" for world in worlds)
    lines = [f"<tr><th></th>{body}</tr>"]
    for rate in rates:
        cells = []
        for world in worlds:
            best = min((one for at, n, one in rows if (at, n) == (rate, world)), key=lambda one: one.iteration_s)
            colour = COLOURS[recipes.index(best.recipe) % len(COLOURS)]
            words = f"{html.escape(best.recipe)}<br>{best.speedup:.1f}x"
            cells.append(f'<td style="background:{colour};padding:.6em">{words}</td>')
        name = "as it is" if rate is None else f"{rate / 1e9:g} Gb/s"
        lines.append(f"<tr><th>{name}</th>{''.join(cells)}</tr>")
    title = html.escape(f"Who wins where: {workload} on {cluster}")
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{title}</title><style>{STYLE}</style>"
        f"<h1>{title}</h1><table>{''.join(lines)}</table></html>\n"
    )
