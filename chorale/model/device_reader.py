"""Weights from files straight to a GPU: several threads read pieces into pinned memory, from where they are
copied while the next piece is read.

A mapped file would be copied page by page through the driver's own staging memory, by one thread; pieces that
eight threads read arrive as fast as the bus takes them (figures: ``docs/benchmarks.md``).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from chorale.errors import CheckpointError
from chorale.model.checkpoint import Checkpoint
from chorale.model.safetensors_file import DTYPES

_THREADS = 8
_PIECE = 16 * 2**20  # bytes


@dataclass(slots=True)
class _Lane:
    """One thread's buffers: two pieces of pinned memory, one filled while the other is copied."""

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
    """A tensor being read. ``wait`` blocks the host until it is read, and the current stream until it is
    copied."""

    tensor: torch.Tensor
    pieces: Sequence[Future[torch.cuda.Event]]

    def wait(self) -> torch.Tensor:
        current = torch.cuda.current_stream(self.tensor.device)
        for piece in self.pieces:
            current.wait_event(piece.result())
        return self.tensor


class DeviceReader:
    """Reads tensors of one checkpoint to one CUDA device. ``close`` it when everything has arrived."""

    def __init__(
        self, checkpoint: Checkpoint, device: torch.device, threads: int = _THREADS, piece: int = _PIECE
    ) -> None:
        """``piece``: bytes that are read and copied at once; each thread pins twice as much."""
        self._checkpoint, self._device, self._piece = checkpoint, device, piece
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="weights")
        self._lane = threading.local()
        self._files: dict[Path, int] = {}

    def start(self, layer: int | None, role: str) -> Arrival:
        """Start reading a tensor, in the file's dtype."""
        file, name = self._checkpoint.place(layer, role)
        entry, (begin, end) = file.entries[name], file.span(name)
        tensor = torch.empty(entry.shape, dtype=DTYPES[entry.dtype], device=self._device)
        raw = tensor.view(-1).view(torch.uint8)
        free = torch.cuda.Event()  # earlier work may still use the memory that the allocator handed out
        free.record(torch.cuda.current_stream(self._device))
        pieces = [
            self._pool.submit(self._copy, file.path, first, raw[first - begin : last - begin], free)
            for first, last in _pieces(begin, end, self._piece)
        ]
        return Arrival(tensor, pieces)

    def close(self) -> None:
        """Wait for everything that was started."""
        self._pool.shutdown()
        for descriptor in self._files.values():
            os.close(descriptor)
        self._files.clear()

    # ------------------------------------------------------------------ in the threads

    def _copy(self, path: Path, first: int, target: torch.Tensor, free: torch.cuda.Event) -> torch.cuda.Event:
        lane = self._own_lane()
        buffer, copied = lane.next_buffer()
        size = target.shape[0]
        _read(self._open(path), buffer.numpy().data[:size], first, path)
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


def _pieces(begin: int, end: int, size: int) -> list[tuple[int, int]]:
    return [(first, min(first + size, end)) for first in range(begin, end, size)]


def _read(descriptor: int, target: memoryview, offset: int, path: Path) -> None:
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
