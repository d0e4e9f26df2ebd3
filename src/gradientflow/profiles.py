"""What is known of a model before it is scheduled: its tensors, in the order in which backward yields them.

The order of `Profile.tensors` is the order of the gradient pool and of everything that follows from it.
Seconds are per iteration on one worker; 0 means not measured, and schedules that need no times accept it.
"""

from __future__ import annotations

import math

import torch
from pydantic import Field, field_validator

from gradientflow.documents import Document, Record

#: 256 times a trillion: what a file says beyond that is not of a model.
MOST_ELEMENTS = 2**48
#: As torch has it.
MOST_DIMENSIONS = 64


class TensorProfile(Record):
    """One trainable tensor.

    >>> TensorProfile(name="fc.weight", shape=(10, 64)).nbytes
    2560
    """

    #: Of the parameter, as `named_parameters()` has it.
    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    device: str = "cpu"
    #: Position in the forward pass, 0 first: what is needed first when the next iteration begins.
    forward_order: int = Field(default=0, ge=0)
    forward_s: float = Field(default=0.0, ge=0.0, allow_inf_nan=False)
    backward_s: float = Field(default=0.0, ge=0.0, allow_inf_nan=False)

    @field_validator("shape")
    @classmethod
    def _sizes_are_counts(cls, shape: tuple[int, ...]) -> tuple[int, ...]:
        if any(size < 0 for size in shape):
            raise ValueError("sizes must be 0 or more")
        if len(shape) > MOST_DIMENSIONS or math.prod(max(1, size) for size in shape) > MOST_ELEMENTS:
            raise ValueError("no memory holds a tensor of that size")
        return shape

    @field_validator("dtype")
    @classmethod
    def _dtype_is_torchs(cls, dtype: str) -> str:
        if not isinstance(getattr(torch, dtype, None), torch.dtype):
            raise ValueError("expected the name of a torch dtype such as float32 or bfloat16")
        return dtype

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor) -> TensorProfile:
        """What a tensor says of itself; order and times are left open."""
        dtype = str(tensor.dtype).removeprefix("torch.")
        return cls(name=name, shape=tuple(tensor.shape), dtype=dtype, device=str(tensor.device))

    @property
    def numel(self) -> int:
        """How many elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """What its gradient takes."""
        return self.numel * self.torch_dtype.itemsize

    @property
    def torch_dtype(self) -> torch.dtype:
        """Its dtype, as torch has it."""
        dtype = getattr(torch, self.dtype)
        assert isinstance(dtype, torch.dtype)
        return dtype

    @property
    def pool(self) -> tuple[str, str]:
        """Tensors share a pool, and so may share a message, when this is equal."""
        return self.device, self.dtype


class Profile(Document):
    """A model's trainable tensors in backward order: what a schedule needs to know of it.

    Measured by `gradientflow.profile`, seen by a flow (`flow.profile()`), or written by hand. A file too:
    `profile.write("profile.json")`, `Profile.read("profile.json")`.

    >>> layers = TensorProfile(name="2.weight", shape=(10, 100)), TensorProfile(name="1.weight", shape=(100, 64))
    >>> Profile(tensors=layers).numel
    7400
    """

    tensors: tuple[TensorProfile, ...]
    #: Floating-point operations of one worker's forward and backward pass; 0 means not counted.
    flops: float = Field(default=0.0, ge=0.0, allow_inf_nan=False)
    #: Processor seconds of it; 0 means not counted, or that an accelerator does it.
    cpu_s: float = Field(default=0.0, ge=0.0, allow_inf_nan=False)

    @field_validator("tensors")
    @classmethod
    def _names_are_unique(cls, tensors: tuple[TensorProfile, ...]) -> tuple[TensorProfile, ...]:
        seen: set[str] = set()
        for tensor in tensors:
            if tensor.name in seen:
                raise ValueError(f"tensor {tensor.name!r} is listed twice")
            seen.add(tensor.name)
        return tensors

    @property
    def by_name(self) -> dict[str, TensorProfile]:
        """Its tensors, by name."""
        return {tensor.name: tensor for tensor in self.tensors}

    @property
    def numel(self) -> int:
        """Elements of all tensors."""
        return sum(tensor.numel for tensor in self.tensors)

    @property
    def nbytes(self) -> int:
        """What all gradients take."""
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def forward_s(self) -> float:
        """Seconds of a forward pass."""
        return sum(tensor.forward_s for tensor in self.tensors)

    @property
    def backward_s(self) -> float:
        """Seconds of a backward pass."""
        return sum(tensor.backward_s for tensor in self.tensors)

    @property
    def intensity(self) -> float:
        """The survey's model intensity I = C / D: operations per parameter that has to be communicated.

        >>> linear = TensorProfile(name="weight", shape=(10, 100))
        >>> Profile(tensors=(linear,), flops=6000.0).intensity
        6.0
        """
        return self.flops / self.numel if self.numel else 0.0
