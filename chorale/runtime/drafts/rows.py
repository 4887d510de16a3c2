"""DraftRows: the device's state by row that steps with drafts need."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from chorale.engine.types import EARLY_STOPS, RowStart
from chorale.kernels.draft_steps import DraftRowState
from chorale.runtime.device import Device
from chorale.runtime.sampling.row_state import DRAFT_NUMBERS
from chorale.runtime.steps.buffers import Buffers


class DraftRows:
    """Owns a ``DraftRowState``. Last tokens and block tables are those of the buffers."""

    def __init__(
        self, device: Device, buffers: Buffers, *, num_drafts: int, window: int, dummy_block: int
    ) -> None:
        """``num_drafts``: the most that a head makes for a row. ``dummy_block``: of dummy rows."""
        target, count = device.torch_device, len(buffers.last_token)
        self._device, self._buffers = device, buffers
        buffers.block_tables[:, buffers.spare_row] = dummy_block

        def room(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=target)

        self.state = DraftRowState(
            last_token=buffers.last_token,
            last_position=torch.ones(count, dtype=torch.int64, device=target),
            drafts=room(max(num_drafts, 1), count),
            key_bases=room(count),
            may_stop_at=room(count),
            stops=torch.full((count, EARLY_STOPS), -1, dtype=torch.int32, device=target),
            floats=room(count, 4, dtype=torch.float32),
            block_tables=buffers.block_tables,
            block_size=buffers.block_size,
            window=window,
            dummy_block=dummy_block,
        )

    def start(self, starts: Sequence[RowStart]) -> None:
        """Set up the rows that start, after the buffers did."""
        if not starts:
            return
        rows = np.array([start.row for start in starts], np.int32)
        numbers = self._buffers.rows.draft_numbers(rows)
        packed = self._device.upload(np.concatenate((rows, numbers.ravel())))
        index, columns = packed[: len(rows)].long(), packed[len(rows) :].view(-1, DRAFT_NUMBERS)
        bases, may_stop_at, stops, floats = columns.split((2, 2, EARLY_STOPS, 4), dim=1)
        state = self.state
        state.key_bases[index] = (
            bases.clone(memory_format=torch.contiguous_format).view(torch.int64).flatten()
        )
        state.may_stop_at[index] = (
            may_stop_at.clone(memory_format=torch.contiguous_format).view(torch.int64).flatten()
        )
        state.stops[index] = stops
        state.floats[index] = floats.contiguous().view(torch.float32)
