"""One memory-mapped safetensors file. Its header is checked before use.

The format: 8 bytes little-endian header length, a JSON header ``{name: {dtype, shape, data_offsets}}``, then
the data. The library of the format checks the header: shapes and types fill the byte ranges, and these are
the whole file without overlaps. Each failure is a ``CheckpointError`` that names the file. Tensors are views
of our own mapping, because the library tells neither where a tensor is in the file, for direct reads, nor
releases pages.
"""

from __future__ import annotations

import json
import math
import mmap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open

from chorale.errors import CheckpointError

# The format allows 100 MB. The longest gpt-oss header (120b in one file) has about 130 KB. Parsed JSON takes
# about ten times its text, so without a tighter limit a hostile file could cost a gigabyte.
MAX_HEADER_BYTES = 8 * 2**20
_MAX_NAME = 256  # characters; gpt-oss's longest tensor name has about 60
_LFS_POINTER = b"version "  # start of the placeholder file in a clone without Git LFS

DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "U8": torch.uint8}


@dataclass(frozen=True, slots=True)
class Entry:
    dtype: str
    shape: tuple[int, ...]
    begin: int  # offset in the data, bytes
    end: int


class SafetensorsFile:
    """Has ``entries`` by tensor name, and ``tensor(name)``. The mapping lives as long as any of its
    tensors."""

    def __init__(self, path: Path, dtypes: Mapping[str, torch.dtype] = DTYPES) -> None:
        """``dtypes``: the types that tensors may have."""
        self.path, self._dtypes = path, dtypes
        try:
            if path.exists() and not path.is_file():  # opening a pipe would block
                raise CheckpointError(f"{path}: not a file")
            with path.open("rb") as file:
                header = _read_header(path, file)
                self._data_start = file.tell()
                # A private, writable mapping, because torch requires writable buffers. It is never written
                # to.
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except OSError as fault:
            raise CheckpointError(f"{path}: cannot be read: {fault}") from fault
        header.pop("__metadata__", None)
        self.entries = {name: _entry(path, name, raw, dtypes) for name, raw in header.items()}
        if not self.entries:
            raise CheckpointError(f"{path}: holds no tensors")

    def span(self, name: str) -> tuple[int, int]:
        """Return the first byte of a tensor in the file, and the byte after its last."""
        entry = self.entries[name]
        return self._data_start + entry.begin, self._data_start + entry.end

    def tensor(self, name: str) -> torch.Tensor:
        """Return a view of the file in the file's dtype, on the CPU. It must not be written to."""
        entry = self.entries[name]
        dtype = self._dtypes[entry.dtype]
        start = self._data_start + entry.begin
        if start % dtype.itemsize:  # legal in the format but not for torch: the only case that copies
            raw = torch.frombuffer(self._map, dtype=torch.uint8, count=entry.end - entry.begin, offset=start)
            return raw.clone().view(dtype).view(entry.shape)
        count = math.prod(entry.shape)
        return torch.frombuffer(self._map, dtype=dtype, count=count, offset=start).view(entry.shape)

    def sample(self, name: str, count: int) -> bytes:
        """Return at most ``count`` bytes from the middle of a tensor."""
        start, end = self.span(name)
        begin = max(start, (start + end - count) // 2)
        return self._map[begin : min(end, begin + count)]

    def release(self) -> None:
        """Release the memory of pages that were read; they are loaded again on the next read. Pages of
        tensors that were copied would otherwise stay in this process."""
        if hasattr(mmap, "MADV_DONTNEED"):  # safe, because the mapping is never written to
            self._map.madvise(mmap.MADV_DONTNEED)


def _read_header(path: Path, file: BinaryIO) -> dict[str, Any]:
    """Return the checked header."""
    prefix = file.read(8)
    if prefix == _LFS_POINTER:
        raise CheckpointError(f"{path}: a Git LFS pointer, not the file itself: git lfs pull fetches it")
    length = int.from_bytes(prefix, "little")
    if length > MAX_HEADER_BYTES:
        raise CheckpointError(f"{path}: header of {length} bytes is over the limit of {MAX_HEADER_BYTES}")
    try:
        with safe_open(path, "np"):
            header: dict[str, Any] = json.loads(file.read(length))
            return header
    except SafetensorError as fault:  # its message may quote the header
        raise CheckpointError(f"{path}: not a whole safetensors file: {str(fault)[:200]!r}") from fault


def _entry(path: Path, name: str, raw: Mapping[str, Any], dtypes: Mapping[str, torch.dtype]) -> Entry:
    check_name(path, name)
    if raw["dtype"] not in dtypes:
        raise CheckpointError(f"{path}: {name}: dtype {raw['dtype']!r} is not one of {sorted(dtypes)}")
    return Entry(raw["dtype"], tuple(raw["shape"]), *raw["data_offsets"])


def check_name(path: Path, name: str) -> None:
    """Refuse names that cannot be shown in a one-line message on a terminal."""
    if not name.isprintable() or len(name) > _MAX_NAME:
        raise CheckpointError(f"{path}: {name[:80]!r} is not the name of a tensor")
