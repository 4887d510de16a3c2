"""The interface of the back ends, and the metadata that they have in common."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, Protocol, TypeVar

import msgspec
import torch

from chorale.errors import RequestError, invalid
from chorale.model.safetensors_file import DTYPES

Named = tuple[str, torch.Tensor]
Check = Callable[[str, torch.dtype, list[int]], None]  # raises if a tensor (name, type, shape) is not wanted
DTYPE_NAMES = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES.values()}
_MOST_BYTES = 2**36  # of one tensor
T = TypeVar("T")


class Backend(Protocol):
    """How tensors arrive at one rank. All methods raise ``RequestError`` or ``CheckpointError``."""

    def init(self, info: dict[str, Any]) -> None:
        """Connect to the sender, if the back end needs that."""
        ...

    def receive(self, info: dict[str, Any], check: Check) -> Iterator[Named]:
        """Yield the tensors of one call. All are checked before any is received. Tensors on a GPU may be
        views of memory that changes after the call, those on a CPU are not."""
        ...

    def finished(self) -> None:
        """Called when the update has ended, however it did."""
        ...

    def close(self) -> None: ...


class Announced(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """vLLM's metadata of tensors: three lists of equal length."""

    names: list[str] = []
    dtype_names: list[str] = []
    shapes: list[list[int]] = []

    def tensors(self) -> list[tuple[str, torch.dtype, list[int]]]:
        """Raises ``RequestError``."""
        if not len(self.names) == len(self.dtype_names) == len(self.shapes):
            raise invalid("update_info", "names, dtype_names and shapes must have the same length")
        found = []
        for name, dtype_name, shape in zip(self.names, self.dtype_names, self.shapes, strict=True):
            dtype = DTYPE_NAMES.get(dtype_name)
            if dtype is None:
                raise invalid("update_info", f"dtype_names must be of {', '.join(sorted(DTYPE_NAMES))}")
            if min(shape, default=0) < 0 or num_bytes(dtype, shape) > _MOST_BYTES:
                raise invalid("update_info", f"shape {shape[:8]} is not possible")
            found.append((name, dtype, shape))
        return found


def num_bytes(dtype: torch.dtype, shape: list[int]) -> int:
    return math.prod(shape) * dtype.itemsize


def convert(info: dict[str, Any], kind: type[T], param: str) -> T:
    """Return ``info`` as a struct. Raises ``RequestError`` that names ``param``."""
    try:
        return msgspec.convert(info, kind)
    except msgspec.ValidationError as error:
        raise RequestError(f"{param}: {error}", param=param) from None


def unpacked(packed: torch.Tensor, some: list[tuple[str, torch.dtype, list[int]]]) -> Iterator[Named]:
    """Yield the tensors whose bytes follow each other in ``packed`` [bytes] uint8; copies, because a view of
    another type may begin at an odd offset."""
    first = 0
    for name, dtype, shape in some:
        size = num_bytes(dtype, shape)
        part = packed[first : first + size]
        aligned = (part.storage_offset() % dtype.itemsize) == 0
        yield name, (part if aligned else part.clone()).view(dtype).view(shape)
        first += size
