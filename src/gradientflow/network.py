"""The network between the workers: who they are, and what was measured between them."""

from __future__ import annotations

from itertools import pairwise

from pydantic import Field, field_validator

from gradientflow.documents import Document, Record

#: Before the name of a pattern, its all-reduce as an operation.
BY_PATTERN = "all_reduce by "
#: As a way of carrying messages: a piece through servers.
SERVED = "ps"
#: Of a message that is nearly all start-up.
ABREAST_NBYTES = 4096
#: Samples, so few that less than two of them lie beyond p10 or p90.
FEW = 20


class Sample(Record):
    """How long one size took, over `num_samples` repetitions."""

    nbytes: int = Field(gt=0, lt=2**62)
    median_s: float = Field(gt=0.0, allow_inf_nan=False)
    p10_s: float = Field(gt=0.0, allow_inf_nan=False)
    p90_s: float = Field(gt=0.0, allow_inf_nan=False)
    num_samples: int = Field(default=1, ge=1)

    @property
    def mean_s(self) -> float:
        """What many messages take, each: by Swanson's rule, so what is rarer than one in ten does not count; of few
        samples, the median. On busy processors a small message takes 1.3 or 6 ms by turns, and a hundred of them do not
        take a hundred times as long as the middle one.

        >>> Sample(nbytes=4, median_s=2.0, p10_s=1.0, p90_s=6.0, num_samples=20).mean_s
        2.9
        """
        if self.num_samples < FEW:
            return self.median_s
        return 0.3 * self.p10_s + 0.4 * self.median_s + 0.3 * self.p90_s


class Measurement(Record):
    """One operation among some ranks, by size."""

    #: `all_reduce`, `reduce_scatter`, `all_gather`, `p2p`: a message from one rank to another, one way; or `tcp`: a
    #: plain stream between them without the backend.
    operation: str
    #: As the measured group counts them.
    ranks: tuple[int, ...]
    samples: tuple[Sample, ...] = Field(min_length=1)
    #: Sizes that would have taken longer than there was time for.
    skipped_nbytes: tuple[int, ...] = ()
    #: alpha + beta * nbytes, the nearest line where gradients travel (16 KiB and more), ...
    alpha_s: float = Field(ge=0.0, allow_inf_nan=False)
    beta_s_per_byte: float = Field(ge=0.0, allow_inf_nan=False)
    #: ... and its largest relative error there.
    residual: float = Field(ge=0.0, allow_inf_nan=False)
    #: Bits a second that a rank's link carried in large messages: goodput, protocol headers not counted.
    rate_bits_s: float = Field(gt=0.0, allow_inf_nan=False)

    @field_validator("samples")
    @classmethod
    def _in_order(cls, samples: tuple[Sample, ...]) -> tuple[Sample, ...]:
        for one, other in pairwise(samples):
            if other.nbytes <= one.nbytes:
                raise ValueError(f"sizes must rise: {other.nbytes} follows {one.nbytes}")
        return samples

    @property
    def points(self) -> tuple[tuple[int, float], ...]:
        """(nbytes, seconds), as a cost table takes them."""
        return tuple((sample.nbytes, sample.mean_s) for sample in self.samples)


class Encoding(Record):
    """What a codec computes on one rank, alone: for each byte of a message, and for each tensor in it."""

    codec: str
    byte_s: float = Field(ge=0.0, allow_inf_nan=False)
    tensor_s: float = Field(ge=0.0, allow_inf_nan=False)


class Carrying(Record):
    """An all-reduce among all: what it takes whatever its size, and for each of its bytes."""

    #: By which it goes; "": the backend's own; `SERVED`: one piece through servers, their part included.
    pattern: str = ""
    message_s: float = Field(ge=0.0, allow_inf_nan=False)
    byte_s: float = Field(ge=0.0, allow_inf_nan=False)
    #: By the clock, what one of `ABREAST_NBYTES` takes while so many are under way: on two lanes, one after the other,
    #: or all at once through servers; 0: not measured. Threads that wake up find processors taken, and wait for
    #: milliseconds in which no processor works for them.
    abreast_s: float = Field(default=0.0, ge=0.0, allow_inf_nan=False)
    abreast: int = Field(default=2, ge=2)


class Processors(Record):
    """What the exchange takes of the processors that rank 0 runs on, in processor seconds of one rank, its part of the
    kernel's work included, while all ranks do the same."""

    cores: int = Field(ge=1)
    #: That share them.
    ranks: int = Field(ge=1)
    carrying: tuple[Carrying, ...] = ()
    #: Taking a gradient from backward: writing each byte of it, scaled, to another place, and whatever its size.
    gather_s_per_byte: float = Field(default=0.0, ge=0.0, allow_inf_nan=False)
    gather_s: float = Field(default=0.0, ge=0.0, allow_inf_nan=False)
    codecs: tuple[Encoding, ...] = ()


class Network(Document):
    """`network.json`. Without measurements it only says who the workers are."""

    backend: str
    #: Host name of each rank.
    hosts: tuple[str, ...]
    measurements: tuple[Measurement, ...] = ()
    #: None in files of versions that did not measure it, and where the system does not count it.
    processors: Processors | None = None

    @property
    def world(self) -> int:
        return len(self.hosts)

    def of(self, operation: str) -> tuple[Measurement, ...]:
        """All measurements of an operation.

        >>> Network(backend="gloo", hosts=("a", "b")).of("p2p")
        ()
        """
        return tuple(found for found in self.measurements if found.operation == operation)
