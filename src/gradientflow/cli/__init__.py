"""The command line: one file a command.

Exit codes: 0 fine, 1 the job failed, 2 wrong use, 128 + signal when stopped. A mistake of the user is one
line on stderr, never a traceback. Files here import torch inside functions only, so that `--help` does
not wait for it.
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from gradientflow import __version__
from gradientflow.cli.bench import bench
from gradientflow.cli.cluster import cluster
from gradientflow.cli.compare import compare
from gradientflow.cli.console import complain
from gradientflow.cli.demo import demo
from gradientflow.cli.doctor import doctor
from gradientflow.cli.elastic import store
from gradientflow.cli.explain import explain
from gradientflow.cli.export import export
from gradientflow.cli.launch import Stopped
from gradientflow.cli.probe import probe
from gradientflow.cli.profile import profile
from gradientflow.cli.report import report
from gradientflow.cli.reproduce import reproduce
from gradientflow.cli.run import run
from gradientflow.cli.server import keys, server
from gradientflow.cli.simulate import simulate
from gradientflow.cli.sweep import sweep
from gradientflow.cli.tune import tune
from gradientflow.cli.watch import watch
from gradientflow.errors import TrainingError, UserError

app = typer.Typer(
    help="The communication backend for PyTorch data-parallel training.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

_BEGIN, _TRAIN = "Begin: does it work here?", "Train"
_MEASURE, _FORETELL, _SERVE = "Measure: what does it take here?", "Foretell: what would it take elsewhere?", "Serve"

# In the order in which a newcomer meets them; help shows it so.
app.command(rich_help_panel=_BEGIN)(doctor)
app.command(rich_help_panel=_BEGIN)(demo)
# What follows the script is the script's, even where it looks like an option of ours.
app.command(rich_help_panel=_TRAIN, context_settings={"allow_interspersed_args": False})(run)
app.command(rich_help_panel=_TRAIN)(watch)
app.command(rich_help_panel=_TRAIN)(explain)
app.command(rich_help_panel=_TRAIN)(report)
app.command(rich_help_panel=_MEASURE)(probe)
app.command(rich_help_panel=_MEASURE)(profile)
app.command(rich_help_panel=_MEASURE)(bench)
app.command(rich_help_panel=_FORETELL)(simulate)
app.command(rich_help_panel=_FORETELL)(sweep)
app.command(rich_help_panel=_FORETELL)(tune)
app.command(rich_help_panel=_FORETELL)(export)
app.command(rich_help_panel=_FORETELL)(cluster)
app.command(rich_help_panel=_FORETELL)(compare)
app.command(rich_help_panel=_FORETELL)(reproduce)
app.command(rich_help_panel=_SERVE)(server)
app.command(rich_help_panel=_SERVE)(keys)
app.command(rich_help_panel=_SERVE)(store)


#: click's UsageError, which some versions of typer carry inside.
_WrongUse: type[Exception] = typer.BadParameter.__mro__[1]


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"gradientflow {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    pass


def main() -> None:
    """The console script."""
    try:
        # Not standalone: wrong options are one line too, not a box.
        sys.exit(app(standalone_mode=False) or 0)
    except _WrongUse as error:
        words: str = error.format_message()  # type: ignore[attr-defined]
        print(words, file=sys.stderr) if "\n" in words else complain(words)  # help, where no command was given
        sys.exit(2)
    except UserError as error:
        complain(str(error))
        sys.exit(2)
    except TrainingError as error:
        complain(str(error))
        sys.exit(1)
    except Stopped as stopped:
        complain(f"stopped by {stopped.signal.name}")
        sys.exit(128 + stopped.signal)
