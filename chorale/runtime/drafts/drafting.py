"""Drafting: the parts of a worker that steps with drafts need: the rows' state, the head, captured steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from chorale.engine.types import DRAFT, EARLY_STOPS, NO_DRAFT, REJECTED, RowStart, StepPlan
from chorale.kernels.draft_steps import DraftRowState
from chorale.kernels.ops import ForwardBatch, Ops
from chorale.kernels.reference.sampling.noise import position_keys
from chorale.model.draft.head import DraftHead
from chorale.runtime.drafts.head_runner import HeadRunner, ReadTokens
from chorale.runtime.drafts.verify_graphs import VerifyGraphRunner
from chorale.runtime.sampling.row_state import DRAFT_NUMBERS
from chorale.runtime.sizing.graph_sizes import MOST_DRAFTING_ROWS
from chorale.runtime.steps.batch import DraftTensors, StepBatch
from chorale.runtime.steps.buffers import Buffers, query_starts
from chorale.runtime.steps.graphs import StepParts


@dataclass(frozen=True, slots=True)
class DraftSetup:
    """The source of drafts. ``head``: None if drafts come with the plans. ``profile``: see ``Ops.accept``."""

    most_drafts: int  # maximum draft tokens per row and step
    head: DraftHead | None
    ops: Ops  # ops of a single rank, because each rank has the whole head
    profile: tuple[float, ...] = ()


class Drafting:
    """Owns the rows' ``DraftRowState``, whose last tokens and tables are the buffers'. ``head``: None if
    drafts come with the plans. ``graphs``: None if every step is launched."""

    def __init__(
        self,
        setup: DraftSetup,
        parts: StepParts,
        *,
        dtype: torch.dtype,
        graph_rows: tuple[int, ...],
        max_len: int,
    ) -> None:
        """``dtype``: the type of the target's states. ``graph_rows``: rows of captured steps; (): no
        captures."""
        device, buffers, kv = parts.device, parts.buffers, parts.kv
        num_blocks, _, _, block_size, _ = kv[0].shape
        self._device, self._buffers = device, buffers
        buffers.block_tables[:, buffers.spare_row] = num_blocks - 1
        num_drafts = setup.most_drafts if setup.head is not None else 0
        self.state = _row_state(buffers, num_drafts, parts.model.config.sliding_window, num_blocks - 1)
        self.head: HeadRunner | None = None
        if setup.head is not None:
            buffers.draft_state = self.state
            shape = setup.head.kv_shape(num_blocks, block_size)
            own_kv = torch.zeros(shape, dtype=kv[0].dtype, device=device.torch_device)
            draw = setup.ops.make_sampler(
                parts.sampler.forbidden, device.sample_rows, ids=setup.head.token_ids
            )
            self.head = HeadRunner(
                setup.head, setup.ops, own_kv, self.state, draw, max_len=max_len, dtype=dtype
            )
        self._profile: torch.Tensor | None = None  # see ``Ops.accept``
        if setup.profile:
            self._profile = torch.tensor(setup.profile, device=device.torch_device)
        self.graphs: VerifyGraphRunner | None = None
        sizes = tuple(size for size in graph_rows if size <= MOST_DRAFTING_ROWS)
        if sizes:
            self.graphs = VerifyGraphRunner(
                parts,
                self.state,
                self.head,
                sizes=sizes,
                most_drafts=setup.most_drafts,
                longest=max_len,
                profile=self._profile,
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

    def settled(self, plan: StepPlan, step: StepBatch, batch: ForwardBatch | None) -> StepBatch:
        """Return the step completed with values known only to the device, and with the profile."""
        if step.drafts is None:
            return step
        if batch is not None and bool((plan.token_ids <= DRAFT).any()):
            step = _follow_device(step, batch, self.state)
        return step if self._profile is None else _pretend(step, self._profile)

    def run_head(
        self, plan: StepPlan, step: StepBatch, batch: ForwardBatch, aux: torch.Tensor, tokens: torch.Tensor
    ) -> torch.Tensor | None:
        """Run the head after a launched step. ``tokens`` [N]: the step's samples, REJECTED where they are not
        kept. Returns the drafts [R, num_made] of the R entries that sample, undefined for rows that get none;
        None if none are made."""
        assert self.head is not None
        assert plan.makes is not None
        assert plan.following is not None
        state, layout = self.state, step.layout
        entries = np.flatnonzero(plan.samples)
        known = np.flatnonzero(plan.following >= 0)
        rows = plan.rows[entries]
        parts = (
            np.cumsum(layout.offsets == 0) - 1,  # [N] number of the sample's entry among those that sample
            np.flatnonzero(layout.offsets == 0),  # [R] its first sample
            rows,
            np.where(plan.makes[entries], rows, self._buffers.spare_row),
            query_starts(plan)[1:][known] - 1,
            plan.following[known],
        )
        packed = self._device.upload(np.concatenate(parts, dtype=np.int32))
        owners, firsts, own, drafting, known_indices, known_tokens = packed.split(
            [len(part) for part in parts]
        )
        following = batch.token_ids.roll(-1)
        following.index_copy_(0, known_indices.long(), known_tokens.long())
        following.index_copy_(0, step.logits_index, tokens.clamp(min=0))
        num_kept = torch.zeros_like(firsts).index_add_(0, owners.long(), (tokens != REJECTED).int())
        last_kept = step.logits_index[(firsts + num_kept - 1).long()]
        state.last_position.index_copy_(0, own.long(), batch.attention.positions[last_kept] + 1)
        self.head.run(ReadTokens(aux, following, batch.attention, last_kept, drafting), plan.num_made)
        return state.drafts[: plan.num_made, own.long()].t() if plan.num_made > 0 else None


def _row_state(buffers: Buffers, num_drafts: int, window: int, dummy_block: int) -> DraftRowState:
    """``num_drafts``: maximum that a head makes for a row."""
    target, count = buffers.last_token.device, len(buffers.last_token)

    def room(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=target)

    return DraftRowState(
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


def _follow_device(step: StepBatch, batch: ForwardBatch, state: DraftRowState) -> StepBatch:
    """Return the step with drafts, noise and stop ids computed from positions that only the device knows."""
    assert step.drafts is not None
    rows, index = step.sampling.row_index, step.logits_index
    positions = batch.attention.positions[index] + 1
    is_early = (positions < state.may_stop_at[rows])[:, None]
    inputs = replace(
        step.sampling.inputs,
        keys=position_keys(state.key_bases[rows], positions),
        early_stops=torch.where(is_early, state.stops[rows], -1),
    )
    sampling = replace(step.sampling, inputs=inputs)
    following = batch.token_ids[(index + 1).clamp(max=len(batch.token_ids) - 1)]
    drafts = torch.where(step.drafts.drafts == NO_DRAFT, NO_DRAFT, following)
    return replace(step, sampling=sampling, drafts=DraftTensors(drafts, step.drafts.firsts))


def _pretend(step: StepBatch, profile: torch.Tensor) -> StepBatch:
    """Return the step with acceptance by ``profile`` [K] instead of by comparison (``Ops.accept``)."""
    drafts = step.drafts
    assert drafts is not None
    offsets = torch.arange(len(drafts.firsts), device=profile.device) - drafts.firsts
    words = step.sampling.inputs.keys[:, 1].long() & 0xFFFFFFFF
    chances = profile[offsets.clamp(max=len(profile) - 1)]
    return replace(step, drafts=replace(drafts, pretended=words < chances * 2.0**32))
