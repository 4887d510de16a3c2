"""What the back ends have in common.

A back end brings tensors to one rank: ``init`` (connect to the sender), ``receive`` (yield the tensors of one
call; all are checked before any is received; on a GPU they may be views of memory that changes after it),
``ended`` (the update has ended, however it did) and ``close``. Their arguments are vLLM's ``init_info`` and
``update_info``; they raise ``RequestError`` or ``CheckpointError``.
"""

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import msgspec
import torch

from chorale.errors import RequestError, invalid
from chorale.model.safetensors_file import DTYPES

Spec = tuple[str, torch.dtype, list[int]]  # name, type and shape of a tensor
Check = Callable[[str, torch.dtype, list[int]], None]  # raises if a tensor is not wanted
DTYPE_NAMES = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES.values()}
_MOST_BYTES = 2**36  # of one tensor
T = TypeVar("T")


class Announced(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """vLLM's metadata of tensors: three lists of equal length."""

    names: list[str] = []
    dtype_names: list[str] = []
    shapes: list[list[int]] = []

    def specs(self, check: Check) -> list[Spec]:
        """Return the tensors, checked. Raises ``RequestError``, and what ``check`` raises."""
        if not len(self.names) == len(self.dtype_names) == len(self.shapes):
            raise invalid("update_info", "names, dtype_names and shapes must have the same length")
        found: list[Spec] = []
        for name, dtype_name, shape in zip(self.names, self.dtype_names, self.shapes, strict=True):
            dtype = DTYPE_NAMES.get(dtype_name)
            if dtype is None or min(shape, default=0) < 0 or num_bytes(dtype, shape) > _MOST_BYTES:
                raise invalid("update_info", f"{name[:200]}: {dtype_name[:20]} {shape[:8]} is not possible")
            check(name, dtype, shape)
            found.append((name, dtype, shape))
        return found


def num_bytes(dtype: torch.dtype, shape: list[int]) -> int:
    return math.prod(shape) * dtype.itemsize


def convert(info: dict[str, Any], kind: type[T], param: str) -> T:
    """Return ``info`` as a struct. Raises ``RequestError`` that names ``param``."""
    try:
        return msgspec.convert(info, kind)
    except msgspec.ValidationError as error:
        raise invalid(param, str(error)) from None


def unpacked(packed: torch.Tensor, specs: list[Spec]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors whose bytes follow each other in ``packed`` [bytes] uint8. Those at an odd offset are
    copies."""
    parts = packed.split([num_bytes(dtype, shape) for _, dtype, shape in specs])
    for (name, dtype, shape), part in zip(specs, parts, strict=True):
        yield name, (part.clone() if part.storage_offset() % dtype.itemsize else part).view(dtype).view(shape)


def read_pickle(data: bytes, known: Mapping[str, Any]) -> Any:
    """Read a pickle without running anything of it: each name in it ("module.name") becomes its value in
    ``known``. Raises ``RequestError`` for other names, and for anything that is not a pickle."""

    class Reader(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            if f"{module}.{name}" not in known:
                raise pickle.UnpicklingError(f"{module}.{name} is not allowed")
            return known[f"{module}.{name}"]

    try:
        return Reader(io.BytesIO(data)).load()
    except Exception as error:  # damaged pickles raise errors of many kinds
        raise RequestError(f"the pickle cannot be read: {str(error)[:300]}") from None
