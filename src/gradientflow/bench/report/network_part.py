"""What a probe measured, as a plot and a table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from gradientflow.bench.report.charts import Line, sizes_plot
from gradientflow.bench.report.page import Page, Row, details, facts, paragraph, rate, seconds, size, table
from gradientflow.network import Measurement, Network

#: More lines could not be told apart.
PLOTTED = 8
LISTED = 200
#: From where on the line was fitted.
FITTED_NBYTES = 16 * 2**10


def add_network(page: Page, network: Network | None) -> None:
    """A section, also where there is nothing to show."""
    found = network.measurements if network else ()
    if not network or not found:
        page.section(
            "The network", paragraph("Not measured. What its links can do is found out by gradientflow probe.")
        )
        return
    swept = [measurement for measurement in found if _is_swept(measurement)]
    fewer = f"; the first {LISTED} of {len(found)}" if len(found) > LISTED else ""
    page.section(
        "The network",
        page.plot("probe", _plot(swept[:PLOTTED]), _caption(len(swept))) if swept else "",
        table(
            f"Links and collectives, as a line alpha + beta × bytes{fewer}",
            ("measured", "alpha", "beta", "rate of a link", "worst error", "sizes", "left out"),
            [_row(measurement) for measurement in found[:LISTED]],
            words=(6,),
        ),
        details("Who the workers are", facts([("backend", network.backend), ("hosts", _hosts(network.hosts))])),
    )


def _is_swept(measurement: Measurement) -> bool:
    """A stream tells a rate and nothing more."""
    return len(measurement.samples) > 1


def _plot(swept: Sequence[Measurement]) -> dict[str, object]:
    lines, fits = [], []
    for measurement in swept:
        samples = measurement.samples
        name = _name(measurement)
        around = [(s.median_s - s.p10_s, s.p90_s - s.median_s) for s in samples]
        lines.append(Line(name, [(s.nbytes, s.median_s) for s in samples], around))
        alpha_s, beta = measurement.alpha_s, measurement.beta_s_per_byte
        fitted = [s.nbytes for s in samples if s.nbytes >= FITTED_NBYTES] or [s.nbytes for s in samples]
        fits.append(Line(f"{name}, fitted", [(nbytes, alpha_s + beta * nbytes) for nbytes in fitted]))
    return sizes_plot(lines, fits)


def _caption(number: int) -> str:
    more = f" The first {PLOTTED} of {number} are drawn." if number > PLOTTED else ""
    return f"Time over size: medians with p10 to p90, and dashed the line that was fitted from 16 KiB on.{more}"


def _name(measurement: Measurement) -> str:
    """
    >>> from gradientflow.network import Sample
    >>> sample = Sample(nbytes=4, median_s=1e-3, p10_s=1e-3, p90_s=1e-3)
    >>> fit = {"samples": (sample,), "alpha_s": 0, "beta_s_per_byte": 0, "residual": 0, "rate_bits_s": 1}
    >>> _name(Measurement(operation="p2p", ranks=(0, 1), **fit))
    'rank 0 to rank 1'
    """
    if measurement.operation in ("p2p", "tcp") and len(measurement.ranks) == 2:
        words = f"rank {measurement.ranks[0]} to rank {measurement.ranks[1]}"
        return words if measurement.operation == "p2p" else f"{words}, plain TCP"
    return f"{measurement.operation} among {len(measurement.ranks)}"


def _row(measurement: Measurement) -> Row:
    skipped, swept = sorted(measurement.skipped_nbytes), _is_swept(measurement)
    first, last = measurement.samples[0], measurement.samples[-1]
    return Row(
        (
            _name(measurement),
            seconds(measurement.alpha_s) if swept else "–",
            f"{1e9 * measurement.beta_s_per_byte:.3f} ns/B" if swept else "–",
            rate(measurement.rate_bits_s),
            f"{measurement.residual:.0%}" if swept else "–",
            f"{size(first.nbytes)} to {size(last.nbytes)}" if swept else size(first.nbytes),
            f"{size(skipped[0])} to {size(skipped[-1])}" if skipped else "",
        )
    )


def _hosts(hosts: Sequence[str]) -> str:
    counted = Counter(hosts)
    return ", ".join(host if number == 1 else f"{host} (×{number})" for host, number in counted.items())
