"""Drafting: the parts of a worker that steps with drafts need: the rows' state, the head, captured steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from chorale.engine.types import EARLY_STOPS, RowStart, StepPlan
from chorale.kernels.draft_steps import DraftRowState
from chorale.kernels.ops import ForwardBatch, Ops
from chorale.model.draft.head import DraftHead
from chorale.model.gpt_oss import GptOss
from chorale.runtime.device import Device
from chorale.runtime.drafts.head_runner import (
    HeadRunner,
    LaunchedHead,
    follow_device,
    has_device_drafts,
    pretend,
)
from chorale.runtime.drafts.verify_graphs import VerifyGraphRunner
from chorale.runtime.sampling.row_state import DRAFT_NUMBERS
from chorale.runtime.sampling.sampler import Sampler
from chorale.runtime.sizing.graph_sizes import MOST_DRAFTING_ROWS
from chorale.runtime.steps.batch import StepBatch
from chorale.runtime.steps.buffers import Buffers


class DraftRows:
    """Owns a ``DraftRowState``. Its last tokens and block tables are the buffers'."""

    def __init__(
        self, device: Device, buffers: Buffers, *, num_drafts: int, window: int, dummy_block: int
    ) -> None:
        """``num_drafts``: maximum that a head makes for a row. ``dummy_block``: the block of dummy rows."""
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
        """Set up the rows that start, after ``Buffers.start_rows``."""
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


@dataclass(frozen=True, slots=True)
class Drafting:
    """``head``: None if drafts come with the plans. ``graphs``: None if every step is launched."""

    rows: DraftRows
    head: HeadRunner | None
    launched: LaunchedHead | None  # runs the head after launched steps
    graphs: VerifyGraphRunner | None
    profile: torch.Tensor | None = None  # see ``Ops.accept``

    def start(self, plan: StepPlan) -> None:
        """Set up the rows that start."""
        self.rows.start(plan.starts)

    def settled(self, plan: StepPlan, step: StepBatch, batch: ForwardBatch | None) -> StepBatch:
        """Return the step completed with values known only to the device, and with the profile."""
        if step.drafts is None:
            return step
        if batch is not None and has_device_drafts(plan):
            step = follow_device(step, batch, self.rows.state)
        return step if self.profile is None else pretend(step, self.profile)

    def run_head(
        self, plan: StepPlan, step: StepBatch, batch: ForwardBatch, aux: torch.Tensor, tokens: torch.Tensor
    ) -> torch.Tensor | None:
        """Run the head after a launched step (``LaunchedHead.run``). Returns the drafts, or None without a
        head."""
        assert self.launched is not None
        made = self.launched.run(plan, step, batch, aux, tokens)
        return made if plan.num_made > 0 else None


@dataclass(frozen=True, slots=True)
class DraftSetup:
    """The source of drafts. ``head``: None if drafts come with the plans. ``profile``: see ``Ops.accept``."""

    most_drafts: int  # maximum draft tokens per row and step
    head: DraftHead | None
    ops: Ops  # ops of a single rank, because each rank has the whole head
    profile: tuple[float, ...] = ()


def make_drafting(
    setup: DraftSetup,
    device: Device,
    model: GptOss,
    kv: list[torch.Tensor],
    buffers: Buffers,
    sampler: Sampler,
    *,
    dtype: torch.dtype,
    graph_rows: tuple[int, ...],
    max_len: int,
) -> Drafting:
    """``dtype``: the type of the target's states. ``graph_rows``: rows of captured steps; (): no captures.
    The pool's last block belongs to dummy rows."""
    num_blocks, _, _, block_size, _ = kv[0].shape
    rows = DraftRows(
        device,
        buffers,
        num_drafts=setup.most_drafts if setup.head is not None else 0,
        window=model.config.sliding_window,
        dummy_block=num_blocks - 1,
    )
    head = launched = None
    if setup.head is not None:
        buffers.draft_state = rows.state
        shape = setup.head.kv_shape(num_blocks, block_size)
        own_kv = torch.zeros(shape, dtype=kv[0].dtype, device=device.torch_device)
        draw = setup.ops.make_sampler(sampler.forbidden, device.sample_rows, ids=setup.head.token_ids)
        head = HeadRunner(setup.head, setup.ops, own_kv, rows.state, draw, max_len=max_len, dtype=dtype)
        launched = LaunchedHead(device, head, rows.state)
    profile, graphs = None, None
    if setup.profile:
        profile = torch.tensor(setup.profile, device=device.torch_device)
    sizes = tuple(size for size in graph_rows if size <= MOST_DRAFTING_ROWS)
    if sizes:
        graphs = VerifyGraphRunner(
            device,
            model,
            kv,
            buffers,
            sampler,
            rows.state,
            head,
            sizes=sizes,
            most_drafts=setup.most_drafts,
            longest=max_len,
            profile=profile,
        )
    return Drafting(rows, head, launched, graphs, profile)
