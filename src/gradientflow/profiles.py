"""What is known of a model before it is scheduled: its tensors, in the order in which backward yields them.

The order of `Profile.tensors` is the order of the gradient pool and of everything that follows from it.
Seconds are per iteration on one worker; 0 means not measured, and schedules that need no times accept it.
"""

from __future__ import annotations

import math

import torch
from pydantic import Field, field_validator

from gradientflow.documents import Document, Record


class TensorProfile(Record):
    """One trainable tensor."""

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
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.torch_dtype.itemsize

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype = getattr(torch, self.dtype)
        assert isinstance(dtype, torch.dtype)
        return dtype

    @property
    def pool(self) -> tuple[str, str]:
        """Tensors share a pool, and so may share a message, when this is equal."""
        return self.device, self.dtype


class Profile(Document):
    """A model's trainable tensors in backward order."""

    tensors: tuple[TensorProfile, ...]
    #: Floating-point operations of one worker's forward and backward pass; 0 means not counted.
    flops: float = Field(default=0.0, ge=0.0, allow_inf_nan=False)

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
        return {tensor.name: tensor for tensor in self.tensors}

    @property
    def numel(self) -> int:
        return sum(tensor.numel for tensor in self.tensors)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def forward_s(self) -> float:
        return sum(tensor.forward_s for tensor in self.tensors)

    @property
    def backward_s(self) -> float:
        return sum(tensor.backward_s for tensor in self.tensors)

    @property
    def intensity(self) -> float:
        """The survey's model intensity I = C / D: operations per parameter that has to be communicated.

        >>> linear = TensorProfile(name="weight", shape=(10, 100))
        >>> Profile(tensors=(linear,), flops=6000.0).intensity
        6.0
        """
        return self.flops / self.numel if self.numel else 0.0
