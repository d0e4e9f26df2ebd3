"""Everything gradientflow raises on purpose.

    GradientFlowError
    ├── UserError              something the caller can mend; also a ValueError
    │   ├── DocumentError      a file that does not hold what it should
    │   ├── RecipeError        a recipe that cannot be read, or whose parts do not fit together
    │   └── UsageError         a call at the wrong time or with the wrong thing
    │       ├── NothingToTrainError  a wrapper for a module without trainable parameters; a RuntimeError too
    │       └── LabUnavailable       the machine allows no lab (gradientflow.lab)
    └── TrainingError          the job cannot go on as it is; also a RuntimeError
        ├── DisagreementError  ranks would not do the same thing; raised before anything is sent
        ├── PeerError          a rank is dead, stopped, has left or is somewhere else: waiting for it is vain
        ├── DeadlineError      somebody did not answer in time
        └── NonFiniteError     an averaged gradient is inf or nan on every rank

The command line turns a `UserError` into one line and exit code 2, a `TrainingError` into one line
and exit code 1. Mistakes of our own are `assert`s.
"""

#: Of one line that somebody is to read.
LONGEST_WORDS = 1000


class GradientFlowError(Exception):
    """Base of all errors raised here."""


class UserError(GradientFlowError, ValueError):
    """The caller can mend this; the message says how. It may quote what was found, which may be of any length."""

    def __init__(self, words: str) -> None:
        super().__init__(words if len(words) <= LONGEST_WORDS else f"{words[: LONGEST_WORDS - 3]}...")


class DocumentError(UserError):
    """A file is missing, is not of the expected kind, or a field in it is wrong."""


class RecipeError(UserError):
    """A recipe cannot be read, or asks for things that do not go together."""


class UsageError(UserError):
    """A call at the wrong time or with the wrong thing."""


class NothingToTrainError(UsageError, RuntimeError):
    """No parameter requires a gradient. A RuntimeError as well, since that is what torch's DDP raises here."""


class TrainingError(GradientFlowError, RuntimeError):
    """The job cannot go on as it is. `ranks` are those to look at, as the whole job counts them."""

    def __init__(self, words: str, ranks: tuple[int, ...] = ()) -> None:
        super().__init__(words)
        self.ranks = ranks


class DisagreementError(TrainingError):
    """Ranks hold different models or plans; nothing was sent."""


class PeerError(TrainingError):
    """Another rank will not come: it is dead, stopped, has left, has skipped the step or waits elsewhere."""


class DeadlineError(TrainingError):
    """A wait ran past its deadline."""


class NonFiniteError(TrainingError):
    """An averaged gradient holds inf or nan; it does so on every rank alike."""
