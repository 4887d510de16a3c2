"""HostPages: slots of host memory, one page each, allocated in pieces that the allocator does not round
up."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from chorale.engine.types import IntArray
from chorale.errors import ConfigError
from chorale.runtime.device import Device
from chorale.runtime.sizing.memory import GIB, gib


class HostPages:
    """``num_slots`` pages. Their memory is pinned if the device copies in the background."""

    def __init__(self, device: Device, num_slots: int, page_bytes: int) -> None:
        """Allocate the pages. Raises ``ConfigError`` if the system has too little memory."""
        self._per_piece = max(1, GIB // page_bytes)
        self._pieces = []
        for first in range(0, num_slots, self._per_piece):
            count = min(self._per_piece, num_slots - first)
            try:
                self._pieces.append(device.host_pages(count, page_bytes))
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
