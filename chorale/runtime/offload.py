"""PageTransfers: copies pages between the KV tensors and host memory while steps run.

Saved pages: before the step that may overwrite them, the steps' stream gathers them into a staging buffer; a
second stream copies that to the host. Loaded pages: a third stream copies them to another staging buffer,
piece by piece, and scatters them into blocks that no step uses. The order of the streams' work guarantees
correctness; the completion of a copy is queried only to inform the scheduler.

    steps    wait for the finished loads · gather · the step · ...
    out      wait for the gather · staging to host
    in       wait for the steps before and for ``out`` · save overwritten blocks · host to staging · scatter

Once a plan lists a load as finished, steps wait for that load, and so does every later copy to the host,
because only then may the load's slots be written again.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch

from chorale.engine.types import HostLoad, IntArray, StepPlan, StepResult, Transfers
from chorale.errors import ConfigError
from chorale.kernels.ops import PageCopies
from chorale.runtime.device import Device
from chorale.runtime.sizing.memory import GIB, gib
from chorale.runtime.sizing.offload import HostTierSizes
from chorale.runtime.streams import Event

COPIES_A_STEP = 64  # maximum copies of loads per step; each call takes the host 10 microseconds
PATIENCE = 0.005  # seconds that a step without rows waits for a load, which delays new requests
_NAP = 0.0001


class HostPages:
    """``num_slots`` pages of host memory, allocated in pieces that the allocator does not round up. It is
    pinned if the device copies in the background."""

    def __init__(self, device: Device, num_slots: int, page_bytes: int) -> None:
        """Allocate the pages. Raises ``ConfigError`` if the system has too little memory."""
        self._per_piece = max(1, GIB // page_bytes)
        self._pieces = []
        for first in range(0, num_slots, self._per_piece):
            count = min(self._per_piece, num_slots - first)
            try:
                self._pieces.append(device.host_memory(count * page_bytes, torch.uint8).view(count, -1))
            except (RuntimeError, MemoryError) as error:
                raise ConfigError(
                    f"--kv-offloading-size: the system gave {gib(first * page_bytes)} of host memory instead "
                    f"of {gib(num_slots * page_bytes)}: {str(error).splitlines()[0]}"
                ) from error

    def runs(self, slots: IntArray) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield (index in ``slots``, memory) of ascending slots; adjacent slots are one tensor."""
        ends = np.flatnonzero((np.diff(slots) != 1) | (slots[1:] % self._per_piece == 0)) + 1
        for begin, end in zip([0, *ends.tolist()], [*ends.tolist(), len(slots)], strict=True):
            piece, first = divmod(int(slots[begin]), self._per_piece)
            yield begin, self._pieces[piece][first : first + end - begin]


@dataclass(frozen=True, slots=True)
class _Piece:
    """A portion of a load that fits into the staging buffer."""

    load_id: int
    slots: IntArray  # ascending
    blocks: IntArray
    is_save: bool = False
    after: tuple[Event, ...] = ()  # events that must be reached before it starts


class PageTransfers:
    """Owns the host's pages and the staging buffers of one rank."""

    def __init__(
        self,
        device: Device,
        copies: PageCopies,
        sizes: HostTierSizes,
        dummy_block: int,
    ) -> None:
        """``dummy_block``: a block of the pool whose content is never read. Raises ``ConfigError`` if memory
        is short."""
        self._device, self._copies = device, copies
        self._host = HostPages(device, sizes.num_slots, sizes.page_bytes)
        target = device.torch_device
        self._staged = torch.empty(sizes.staged, sizes.page_bytes, dtype=torch.uint8, device=target)
        self._loaded = torch.empty(sizes.loaded, sizes.page_bytes, dtype=torch.uint8, device=target)
        self._out, self._in = device.stream(), device.stream()
        self._position = 0  # in ``_staged``, which is filled in turns
        self._leaving: deque[tuple[int, int, Event]] = deque()  # ranges of it that are not on the host yet
        self._last_out: Event | None = None
        self._pieces: deque[_Piece] = deque()  # pieces of loads that are not enqueued yet
        self._ends: dict[int, Event | None] = {}  # load -> its end; None: not completely enqueued
        self._unreported: list[int] = []
        self._warm_up(dummy_block)

    def _warm_up(self, dummy_block: int) -> None:
        """Compile the kernels before the first step."""
        block = self._device.upload(np.array([dummy_block], np.int32))
        self._copies.gather(block, self._staged[:1])
        self._copies.scatter(self._staged[:1], block)

    # ------------------------------------------------------------------ a step

    def before(self, plan: StepPlan) -> None:
        """Enqueue the copies that must precede the step."""
        if plan.transfers is not None:
            self._begin(plan.transfers)
        if self._pieces:
            self._advance(None if not len(plan.rows) else COPIES_A_STEP)

    def reporting(self, plan: StepPlan, fetch: Callable[[], StepResult]) -> Callable[[], StepResult]:
        """Wrap ``fetch`` to report the loads that have ended by then."""
        if not self._unreported:
            return fetch

        def result() -> StepResult:
            found = fetch()
            if not len(plan.rows):
                self._wait()
            done = self._take_done()
            return replace(found, loads_done=done) if done else found

        return result

    def _begin(self, transfers: Transfers) -> None:
        for load_id in transfers.finished:
            self._finish(load_id)
        if len(transfers.saved_slots):
            self._save(*_ascending(transfers.saved_slots, transfers.saved_blocks))
        for load in transfers.loads:
            self._queue(load)

    # ------------------------------------------------------------------ saved pages

    def _save(self, slots: IntArray, blocks: IntArray) -> None:
        """Copy blocks to the host with their content before the next enqueued step."""
        room = len(self._staged)
        begin = 0
        while begin < len(slots):
            if self._position == room:
                self._position = 0
            end = min(len(slots), begin + room - self._position)
            self._save_some(self._position, slots[begin:end], blocks[begin:end])
            self._position += end - begin
            begin = end

    def _save_some(self, first_page: int, slots: IntArray, blocks: IntArray) -> None:
        staging = self._staged[first_page : first_page + len(slots)]
        while self._leaving and self._leaving[0][2].is_reached:
            self._leaving.popleft()
        for first, last, left in self._leaving:
            if first < first_page + len(slots) and first_page < last:
                left.hold()  # the host bus is slower than the GPU: wait until this range is on the host
        self._copies.gather(self._device.upload(blocks), staging)
        gathered = self._device.event()
        with self._out.current():
            gathered.hold()
            for begin, memory in self._host.runs(slots):
                memory.copy_(staging[begin : begin + len(memory)], non_blocking=True)
            self._last_out = self._device.event()
        self._leaving.append((first_page, first_page + len(slots), self._last_out))

    # ------------------------------------------------------------------ loaded pages

    def _queue(self, load: HostLoad) -> None:
        """Queue the pieces of a load. It starts after all steps and copies enqueued so far."""
        after = [self._device.event()]
        if self._last_out is not None:
            after.append(self._last_out)
        for is_save, slots, blocks in (
            (True, load.saved_slots, load.saved_blocks),
            (False, load.slots, load.blocks),
        ):
            slots, blocks = _ascending(slots, blocks)
            for begin in range(0, len(slots), len(self._loaded)):
                some = slice(begin, begin + len(self._loaded))
                piece = _Piece(load.load_id, slots[some], blocks[some], is_save, tuple(after))
                self._pieces.append(piece)
                after.clear()
        self._ends[load.load_id] = None
        self._unreported.append(load.load_id)

    def _advance(self, most: int | None) -> None:
        """Enqueue pieces with about ``most`` copies in total; None: all pieces."""
        count = 0
        while self._pieces and (most is None or count < most):
            piece = self._pieces.popleft()
            with self._in.current():
                count += self._move(piece)
                if not self._pieces or self._pieces[0].load_id != piece.load_id:
                    self._ends[piece.load_id] = self._device.event()

    def _move(self, piece: _Piece) -> int:
        """Enqueue a piece on the current stream. Returns the number of copies."""
        for event in piece.after:
            event.hold()
        staging, count = self._loaded[: len(piece.slots)], 0
        blocks = self._device.upload(piece.blocks)
        if piece.is_save:
            self._copies.gather(blocks, staging)
        for begin, memory in self._host.runs(piece.slots):
            part = staging[begin : begin + len(memory)]
            source, target = (part, memory) if piece.is_save else (memory, part)
            target.copy_(source, non_blocking=True)
            count += 1
        if not piece.is_save:
            self._copies.scatter(staging, blocks)
        return count

    def _finish(self, load_id: int) -> None:
        """Let steps enqueued later wait for a load."""
        while self._ends.get(load_id, self) is None:
            self._advance(1)
        end = self._ends.pop(load_id, None)
        if end is not None:
            end.hold()
        if load_id in self._unreported:
            self._unreported.remove(load_id)

    def _take_done(self) -> tuple[int, ...]:
        """Return the loads that have ended since the last call, in order."""
        done = []
        while self._unreported and self._is_over(self._unreported[0]):
            done.append(self._unreported.pop(0))
        return tuple(done)

    def _is_over(self, load_id: int) -> bool:
        end = self._ends[load_id]
        return end is not None and end.is_reached

    def _wait(self) -> None:
        """Wait for the oldest load, at most ``PATIENCE``."""
        until = time.monotonic() + PATIENCE
        while self._unreported and not self._is_over(self._unreported[0]) and time.monotonic() < until:
            time.sleep(_NAP)


def _ascending(slots: IntArray, blocks: IntArray) -> tuple[IntArray, IntArray]:
    """Sort by slot, so that adjacent slots are copied at once."""
    order = np.argsort(slots)
    return slots[order], blocks[order]
