"""Reads weights from files directly to a GPU: several threads read pieces into pinned memory and copy each
piece while they read the next.

A mapped file would be copied page by page through the driver's staging memory, by one thread; with eight
threads, pieces arrive as fast as the bus can copy them (figures: ``docs/reference/benchmarks.md``).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from chorale.errors import CheckpointError
from chorale.model.checkpoint import Checkpoint
from chorale.model.cuts import Cut
from chorale.model.safetensors_file import DTYPES

_THREADS = 8
_PIECE = 16 * 2**20  # bytes
_LEAST_RANGE = 64 * 1024  # bytes; for shorter ranges the whole row is read


@dataclass(slots=True)
class _Lane:
    """One thread's buffers: two pieces of pinned memory; one is filled while the other is copied."""

    stream: torch.cuda.Stream
    buffers: list[torch.Tensor]  # 2 x [piece] uint8
    copied: list[torch.cuda.Event]
    turn: int = 0

    def next_buffer(self) -> tuple[torch.Tensor, torch.cuda.Event]:
        self.turn ^= 1
        self.copied[self.turn].synchronize()
        return self.buffers[self.turn], self.copied[self.turn]


@dataclass(frozen=True, slots=True)
class Arrival:
    """A tensor that is being read. ``wait`` blocks the host until it is read, and the current stream until it
    is copied."""

    tensor: torch.Tensor
    pieces: Sequence[Future[torch.cuda.Event]]

    def wait(self) -> torch.Tensor:
        current = torch.cuda.current_stream(self.tensor.device)
        for piece in self.pieces:
            current.wait_event(piece.result())
        return self.tensor


class DeviceReader:
    """Reads tensors of one checkpoint to one CUDA device. Call ``close`` after all tensors have arrived."""

    def __init__(
        self, checkpoint: Checkpoint, device: torch.device, threads: int = _THREADS, piece: int = _PIECE
    ) -> None:
        """``piece``: bytes read and copied at a time; each thread pins twice as much."""
        self._checkpoint, self._device, self._piece = checkpoint, device, piece
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="weights", initializer=self._enter)
        self._lane = threading.local()
        self._files: dict[Path, int] = {}

    def start(self, layer: int | None, role: str, cut: Cut | None = None) -> Arrival:
        """Start reading a tensor, or a part of it, in the file's dtype."""
        file, name = self._checkpoint.locate(layer, role)
        entry, (begin, end) = file.entries[name], file.span(name)
        shape, dtype = entry.shape, DTYPES[entry.dtype]
        if cut is None:
            pieces = pieces_of(1, end - begin, [range(end - begin)], self._piece)
        else:
            pieces = pieces_of(*cut.spans(shape, dtype.itemsize), self._piece)
            shape = cut.shape(shape)
        tensor = torch.empty(shape, dtype=dtype, device=self._device)
        raw = tensor.view(-1).view(torch.uint8)
        free = torch.cuda.Event()  # earlier work may still use the allocated memory
        free.record(torch.cuda.current_stream(self._device))
        jobs = [
            self._pool.submit(self._copy, file.path, begin, piece, raw[piece.start : piece.stop], free)
            for piece in pieces
        ]
        return Arrival(tensor, jobs)

    def close(self) -> None:
        """Wait for all tensors that were started."""
        self._pool.shutdown()
        for descriptor in self._files.values():
            os.close(descriptor)
        self._files.clear()

    # ------------------------------------------------------------------ reader threads

    def _enter(self) -> None:
        """Select the device in a thread: otherwise pinned memory would open a context on the first GPU."""
        if self._device.index is not None:
            torch.cuda.set_device(self._device)

    def _copy(
        self, path: Path, begin: int, piece: Piece, target: torch.Tensor, free: torch.cuda.Event
    ) -> torch.cuda.Event:
        lane = self._own_lane()
        buffer, copied = lane.next_buffer()
        size = target.shape[0]
        piece.read(self._open(path), begin, buffer.numpy()[:size], path)
        with torch.cuda.stream(lane.stream):
            lane.stream.wait_event(free)
            target.copy_(buffer[:size], non_blocking=True)
            copied.record(lane.stream)
            done = torch.cuda.Event()
            done.record(lane.stream)
        return done

    def _own_lane(self) -> _Lane:
        lane: _Lane | None = getattr(self._lane, "value", None)
        if lane is None:
            buffers = [torch.empty(self._piece, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
            events = [torch.cuda.Event() for _ in range(2)]
            lane = self._lane.value = _Lane(torch.cuda.Stream(self._device), buffers, events)
        return lane

    def _open(self, path: Path) -> int:
        descriptor = self._files.get(path)
        if descriptor is None:
            opened = os.open(path, os.O_RDONLY)
            descriptor = self._files.setdefault(path, opened)
            if descriptor != opened:  # another thread was faster
                os.close(opened)
        return descriptor


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes that are read at once, and their position in the tensor. Offsets count from its first byte."""

    offset: int  # in the file
    rows: int
    width: int  # bytes of a row in the file
    kept: tuple[range, ...]  # bytes of each row that go to the tensor
    start: int  # in the tensor

    @property
    def stop(self) -> int:
        return self.start + self.rows * sum(map(len, self.kept))

    def read(self, descriptor: int, begin: int, target: npt.NDArray[np.uint8], path: Path) -> None:
        """Fill ``target``. ``begin``: the tensor's first byte in the file. Raises ``CheckpointError``."""
        if self.rows * self.width == len(target):
            read_fully(descriptor, target.data, begin + self.offset, path)
            return
        found = np.empty(self.rows * self.width, np.uint8)
        read_fully(descriptor, found.data, begin + self.offset, path)
        rows, kept, first = found.reshape(self.rows, -1), target.reshape(self.rows, -1), 0
        for some in self.kept:
            kept[:, first : first + len(some)] = rows[:, some.start : some.stop]
            first += len(some)


def pieces_of(rows: int, width: int, ranges: Sequence[range], size: int) -> list[Piece]:
    """Return the pieces, of at most ``size`` bytes, that cover ``ranges`` of each row.

    Short ranges are read together with the gaps between them: one call per range would take longer.
    """
    count = sum(map(len, ranges))
    if min(map(len, ranges)) < _LEAST_RANGE and width <= size and rows > 1:
        each = size // width
        return [
            Piece(row * width, min(each, rows - row), width, tuple(ranges), row * count)
            for row in range(0, rows, each)
        ]
    found = []
    for row in range(rows):
        start = row * count
        for some in ranges:
            for first in range(some.start, some.stop, size):
                length = min(size, some.stop - first)
                found.append(Piece(row * width + first, 1, length, (range(length),), start))
                start += length
    return found


def read_fully(descriptor: int, target: memoryview, offset: int, path: Path) -> None:
    """Fill ``target``. Raises ``CheckpointError`` if the file was truncated or cannot be read."""
    filled = 0
    while filled < len(target):
        try:
            count = os.preadv(descriptor, [target[filled:]], offset + filled)
        except OSError as fault:
            raise CheckpointError(f"{path}: cannot be read: {fault}") from fault
        if count == 0:
            raise CheckpointError(f"{path}: became shorter while it was read")
        filled += count
