"""One memory-mapped safetensors file. Its header is checked before use.

The format: 8 bytes little-endian header length, a JSON header ``{name: {dtype, shape, data_offsets}}``, then
the data. Before any tensor is returned, the header is checked: its length fits the file, every entry has
known fields and types, element count times item size equals its byte range, and the ranges tile the data
exactly (no overlap, no hole, none outside the file). Each failure is a ``CheckpointError`` that names file
and tensor. No memory is allocated by a number in the header; tensors are views of the mapping.
"""

from __future__ import annotations

import json
import math
import mmap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

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
                size = path.stat().st_size
                header, self._data_start = _read_header(path, file.read, size)
                self.entries = _check_entries(path, header, size - self._data_start, dtypes)
                # A private, writable mapping, because torch requires writable buffers. It is never written
                # to.
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except OSError as fault:
            raise CheckpointError(f"{path}: cannot be read: {fault}") from fault

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


def _read_header(path: Path, read: Any, size: int) -> tuple[dict[str, Any], int]:
    """Return (parsed header, offset of the data)."""
    prefix = read(8)
    if len(prefix) < 8:
        raise CheckpointError(f"{path}: {size} bytes is too short for a safetensors file")
    if prefix == _LFS_POINTER:
        raise CheckpointError(f"{path}: a Git LFS pointer, not the file itself: git lfs pull fetches it")
    length = int.from_bytes(prefix, "little")
    if length > MAX_HEADER_BYTES:
        raise CheckpointError(f"{path}: header of {length} bytes is over the limit of {MAX_HEADER_BYTES}")
    if 8 + length > size:
        raise CheckpointError(f"{path}: truncated: header of {length} bytes in a file of {size}")
    try:
        header = json.loads(read(length).decode(), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as fault:
        raise CheckpointError(f"{path}: header is not valid JSON: {fault}") from fault
    if not isinstance(header, dict):
        raise CheckpointError(f"{path}: header is not a JSON object")
    return header, 8 + length


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Refuse duplicate keys, which JSON allows and readers interpret differently."""
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a key appears twice")
    return result


def _check_entries(
    path: Path, header: dict[str, Any], data_size: int, dtypes: Mapping[str, torch.dtype]
) -> dict[str, Entry]:
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointError(f"{path}: __metadata__ must map strings to strings")
    entries = {name: _check_entry(path, name, raw, dtypes) for name, raw in header.items()}
    if not entries:
        raise CheckpointError(f"{path}: holds no tensors")
    position = 0
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.begin != position:
            kind = "overlaps another tensor" if entry.begin < position else "leaves a hole before it"
            raise CheckpointError(f"{path}: {name}: {kind} at byte {entry.begin}")
        position = entry.end
        if position > data_size:
            problem = f"truncated: ends at byte {position} of {data_size}"
            raise CheckpointError(f"{path}: {name}: {problem}")
    if position != data_size:
        raise CheckpointError(f"{path}: {data_size - position} bytes after the last tensor")
    return entries


def check_name(path: Path, name: str) -> None:
    """Refuse names that cannot be shown in a one-line message on a terminal."""
    if not name.isprintable() or len(name) > _MAX_NAME:
        raise CheckpointError(f"{path}: {name[:80]!r} is not the name of a tensor")


def _check_entry(path: Path, name: str, raw: Any, dtypes: Mapping[str, torch.dtype]) -> Entry:
    check_name(path, name)
    if not isinstance(raw, dict) or set(raw) != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(f"{path}: {name}: must have exactly dtype, shape and data_offsets")
    dtype, shape, offsets = raw["dtype"], raw["shape"], raw["data_offsets"]
    if not isinstance(dtype, str) or dtype not in dtypes:
        raise CheckpointError(f"{path}: {name}: dtype {str(dtype)[:40]!r} is not one of {sorted(dtypes)}")
    if not isinstance(shape, list) or len(shape) > 8 or not all(map(_is_size, shape)):
        raise CheckpointError(f"{path}: {name}: shape must be a list of at most 8 sizes")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_size, offsets)):
        raise CheckpointError(f"{path}: {name}: data_offsets must be two byte positions")
    begin, end = offsets
    if end - begin != math.prod(shape) * dtypes[dtype].itemsize:
        problem = f"shape {shape} of {dtype} does not fill bytes {begin} to {end}"
        raise CheckpointError(f"{path}: {name}: {problem}")
    return Entry(dtype, tuple(shape), begin, end)


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**48
