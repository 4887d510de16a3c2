"""HeadRunner: runs a draft head at the end of a step. Its first pass reads the states of all tokens of the
step, each with the next token, so that its keys and values stay in step with the target's. The state of a
row's last kept token gives the first draft token; each further pass takes one token per row. P-EAGLE and
DFlash draft all tokens of a row in one pass, with masks in place of those not known yet. ``LaunchedHead``
runs it after steps that are launched kernel by kernel, because of prompts or rows with special sampling.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F

from chorale.engine.types import DRAFT, NO_DRAFT, REJECTED, StepPlan
from chorale.kernels.draft_steps import DraftPasses, DraftRowState
from chorale.kernels.ops import AttentionMeta, ForwardBatch, Ops, Sample, SamplingInputs
from chorale.kernels.reference.sampling.noise import position_keys
from chorale.model.draft.head import DraftHead
from chorale.model.gpt_oss import AuxStates
from chorale.runtime.device import Device
from chorale.runtime.sizing.memory import LOGIT_ROWS
from chorale.runtime.steps.batch import DraftTensors, StepBatch
from chorale.runtime.steps.buffers import query_starts


@dataclass(frozen=True, slots=True)
class ReadTokens:
    """The tokens of a step, for the head's first pass. R rows sample."""

    aux: torch.Tensor  # [T, A * H] the target's states
    following: torch.Tensor  # [T] int64 the token after each token
    attention: AttentionMeta
    last_kept: torch.Tensor  # [R] int64 index of the last kept token among the T
    rows: torch.Tensor  # [R] int32 device row; the dummy row for rows that get no drafts


class HeadRunner:
    """Owns the head's keys and values, and the memory of its passes. Never waits for the device, so a graph
    may contain ``run``."""

    def __init__(
        self,
        head: DraftHead,
        ops: Ops,
        kv: torch.Tensor,
        state: DraftRowState,
        draw: Sample,
        *,
        max_len: int,
        dtype: torch.dtype,
    ) -> None:
        """``draw``: samples draft tokens. ``dtype``: the type of the target's states."""
        self._head, self._ops, self._kv, self._state, self._draw = head, ops, kv, state, draw
        self._max_len, self._dtype = max_len, dtype
        device, (passes, rows), width = kv.device, state.drafts.shape, state.block_tables.shape[2]
        self._is_parallel = head.config.kind != "eagle3"
        passes += 2 if self._is_parallel else 0  # the last token's position, and the one after the draft
        entries = rows * passes if self._is_parallel else rows
        mask = head.weights.mask
        self._mask_state = None if mask is None else head.project(mask.to(dtype))  # [1, H]

        def room(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self._passes = DraftPasses(
            keys=room(passes, rows, 2),
            temperature=room(rows, dtype=torch.float32),
            positions=room(passes, rows, dtype=torch.int64),
            context_lens=room(passes, rows),
            slots=room(passes, rows, dtype=torch.int64),
            tables=room(rows, width),
        )
        self._index = torch.arange(entries, device=device)
        self._query_start = torch.arange(entries + 1, dtype=torch.int32, device=device)
        self._drawn = room(entries, dtype=torch.int64)

    @property
    def kv(self) -> torch.Tensor:
        """The head's keys and values, by layer, in the pool's blocks."""
        return self._kv

    def aux_states(self, num_tokens: int) -> AuxStates:
        """Allocate memory for the target's states of a step."""
        config = self._head.config
        states = torch.empty(num_tokens, config.aux_width, dtype=self._dtype, device=self._kv.device)
        return AuxStates(config.aux_boundaries, states)

    def run(self, read: ReadTokens, num_made: int, longest: int | None = None) -> None:
        """Read a step's tokens, and make ``num_made`` draft tokens for its rows, in ``DraftRowState``.
        ``longest``: approximate tokens of the longest context; None: the maximum length.
        """
        head, count = self._head, len(read.rows)
        if self._is_parallel:
            self._run_parallel(read, num_made if count else 0, longest or self._max_len)
            return
        x = head.run(head.project(read.aux), read.following, read.attention, self._kv)
        if not num_made or not count:
            return
        passes = self._passes_of(num_made)
        self._ops.draft_passes(read.rows, self._state, passes)
        rows, index = read.rows.long(), read.last_kept
        for number in range(num_made):
            drafts = self._state.drafts[number]
            draws = SamplingInputs(passes.keys[number, :count], passes.temperature[:count], read.rows)
            self._draw(head.logits(x, index), draws, drafts, self._drawn[:count])
            if number + 1 < num_made:
                states = head.next_states(x.index_select(0, index))
                x = head.run(
                    states,
                    drafts[rows],
                    self._attention(passes, number + 1, count, longest or self._max_len),
                    self._kv,
                )
                index = self._index[:count]

    def _run_parallel(self, read: ReadTokens, num_made: int, longest: int) -> None:
        """``run`` in one pass. Entries of drafts are ordered by number, then by row."""
        head, count, states = self._head, len(read.rows), self._head.project(read.aux)
        if num_made:
            passes = self._passes_of(num_made + 2)
            self._ops.draft_passes(read.rows, self._state, passes)
        if head.config.kind == "dflash":
            head.read(states, read.attention, self._kv)
            if not num_made:
                return
            block = self._masks(passes, range(1, num_made + 2), count, longest)
            ends = passes.context_lens[num_made + 1, :count].repeat(num_made + 1)  # sees the whole block
            tokens = torch.full_like(block.positions, head.config.mask_token)
            # In a dry run, no kernel has written these tokens, and an id outside of the table stops the GPU.
            last = read.following.index_select(0, read.last_kept)
            tokens[:count] = last.clamp(0, head.config.vocab_size - 1)
            x = head.run_block(tokens, replace(block, context_lens=ends), self._kv)
            index = self._index[count : count * (num_made + 1)]
        else:
            tokens, attention, index = read.following, read.attention, read.last_kept
            if num_made > 1:
                assert self._mask_state is not None
                masks = self._masks(passes, range(1, num_made), count, longest)
                extra = len(masks.positions)
                states = torch.cat((states, self._mask_state.expand(extra, -1)))
                tokens = torch.cat((tokens, tokens.new_full((extra,), head.config.mask_token)))
                index = torch.cat((index, self._index[:extra] + len(read.following)))
                attention = _joined(attention, masks)
            x = head.run(states, tokens, attention, self._kv)
        if num_made:
            self._draw_all(x, index, passes, read.rows, num_made)

    def _masks(self, passes: DraftPasses, numbers: range, count: int, longest: int) -> AttentionMeta:
        """Return the metadata of the passes ``numbers`` as rows of one token each."""
        some, total = slice(numbers.start, numbers.stop), len(numbers) * count
        tables, slots = passes.tables[:count].repeat(len(numbers), 1), passes.slots[some, :count].flatten()
        return AttentionMeta(
            positions=passes.positions[some, :count].flatten(),
            query_start=self._query_start[: total + 1],
            context_lens=passes.context_lens[some, :count].flatten(),
            block_tables=(tables, tables),
            slots=(slots, slots),
            max_query_len=1,
            max_context_len=longest,
        )

    def _draw_all(
        self, x: torch.Tensor, index: torch.Tensor, passes: DraftPasses, rows: torch.Tensor, num_made: int
    ) -> None:
        """Sample the drafts of all numbers from x at ``index``, some rows of logits at a time."""
        count, drafts = len(rows), self._state.drafts[:num_made]
        keys, temperature = passes.keys[:num_made, :count].flatten(0, 1), passes.temperature[:count]
        places = (self._query_start[:num_made, None] * drafts.shape[1] + rows).flatten()  # in flat drafts
        for first in range(0, len(index), LOGIT_ROWS):
            some = slice(first, min(first + LOGIT_ROWS, len(index)))
            draws = SamplingInputs(keys[some], temperature.repeat(num_made)[some], places[some])
            self._draw(self._head.logits(x, index[some]), draws, drafts.view(-1), self._drawn[some])

    def _passes_of(self, num_made: int) -> DraftPasses:
        whole = self._passes
        return DraftPasses(
            keys=whole.keys[:num_made],
            temperature=whole.temperature,
            positions=whole.positions[:num_made],
            context_lens=whole.context_lens[:num_made],
            slots=whole.slots[:num_made],
            tables=whole.tables,
        )

    def _attention(self, passes: DraftPasses, number: int, count: int, longest: int) -> AttentionMeta:
        tables, slots = passes.tables[:count], passes.slots[number, :count]
        return AttentionMeta(
            positions=passes.positions[number, :count],
            query_start=self._query_start[: count + 1],
            context_lens=passes.context_lens[number, :count],
            block_tables=(tables, tables),
            slots=(slots, slots),
            max_query_len=1,
            max_context_len=longest,
        )


def _joined(first: AttentionMeta, second: AttentionMeta) -> AttentionMeta:
    """Return the rows of both. The full group's tables and slots stand for both groups'."""
    table, more = first.block_tables[0], second.block_tables[0]
    tables = torch.cat((F.pad(table, (0, more.shape[1] - table.shape[1])), more))
    slots = torch.cat((first.slots[0], second.slots[0]))
    starts = second.query_start[1:] + first.query_start[-1]
    return AttentionMeta(
        positions=torch.cat((first.positions, second.positions)),
        query_start=torch.cat((first.query_start, starts)),
        context_lens=torch.cat((first.context_lens, second.context_lens)),
        block_tables=(tables, tables),
        slots=(slots, slots),
        max_query_len=first.max_query_len,
        max_context_len=max(first.max_context_len, second.max_context_len),
    )


def has_device_drafts(plan: StepPlan) -> bool:
    return plan.num_drafts is not None and bool((plan.token_ids <= DRAFT).any())


def follow_device(step: StepBatch, batch: ForwardBatch, state: DraftRowState) -> StepBatch:
    """Return the step with drafts, noise and stop ids computed from positions that only the device knows."""
    assert step.drafts is not None
    rows, index = step.sampling.row_index, step.logits_index
    positions = batch.attention.positions[index] + 1
    is_early = (positions < state.may_stop_at[rows])[:, None]
    sampling = replace(
        step.sampling,
        keys=position_keys(state.key_bases[rows], positions),
        early_stops=torch.where(is_early, state.stops[rows], -1),
    )
    following = batch.token_ids[(index + 1).clamp(max=len(batch.token_ids) - 1)]
    drafts = torch.where(step.drafts.drafts == NO_DRAFT, NO_DRAFT, following)
    return replace(step, sampling=sampling, drafts=DraftTensors(drafts, step.drafts.firsts))


def pretend(step: StepBatch, profile: torch.Tensor) -> StepBatch:
    """Return the step with acceptance by ``profile`` [K] instead of by comparison (``Ops.accept``)."""
    drafts = step.drafts
    assert drafts is not None
    offsets = torch.arange(len(drafts.firsts), device=profile.device) - drafts.firsts
    words = step.sampling.keys[:, 1].long() & 0xFFFFFFFF
    chances = profile[offsets.clamp(max=len(profile) - 1)]
    return replace(step, drafts=replace(drafts, pretended=words < chances * 2.0**32))


class LaunchedHead:
    """Runs the head after a launched step."""

    def __init__(self, device: Device, runner: HeadRunner, state: DraftRowState) -> None:
        self._device, self._runner, self._state = device, runner, state

    def run(
        self, plan: StepPlan, step: StepBatch, batch: ForwardBatch, aux: torch.Tensor, tokens: torch.Tensor
    ) -> torch.Tensor:
        """Run the head. ``tokens`` [N]: the step's samples, REJECTED where they are not kept. Returns the
        drafts [R, num_made] of the R entries that sample; undefined for rows that get none.
        """
        assert plan.makes is not None
        assert plan.following is not None
        state, layout = self._state, step.layout
        entries = np.flatnonzero(plan.samples)
        known = np.flatnonzero(plan.following >= 0)
        rows = plan.rows[entries]
        spare_row = len(state.last_token) - 1
        parts = (
            np.cumsum(layout.offsets == 0) - 1,  # [N] number of the sample's entry among those that sample
            np.flatnonzero(layout.offsets == 0),  # [R] its first sample
            rows,
            np.where(plan.makes[entries], rows, spare_row),
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
        self._runner.run(ReadTokens(aux, following, batch.attention, last_kept, drafting), plan.num_made)
        return state.drafts[: plan.num_made, own.long()].t()
