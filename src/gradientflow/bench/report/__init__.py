"""One self-contained page about a bake-off, trainings or a run, to send to a colleague: it opens without a network.

    write_report           what `gradientflow bench --out` found: methods against their limits, an iteration of each
    write_learning_report  what `benchmarks/accuracy.py --out` found: what methods learn, and how soon
    write_run_report       what `gradientflow run` left behind: its plan, its steps, who waited for whom

Beside a page about a bake-off or a run lies one trace of all ranks for Perfetto. Text from files is escaped in
`page.py`, and only there.
"""

from gradientflow.bench.report.bakeoff_page import write_report
from gradientflow.bench.report.learning_page import write_learning_report
from gradientflow.bench.report.run_page import write_run_report

__all__ = ["write_learning_report", "write_report", "write_run_report"]
