"""``Ops.verify_inputs``, ``accept`` and ``draft_passes`` in plain torch."""

from __future__ import annotations

import torch

from chorale.engine.types import DRAFT, REJECTED
from chorale.kernels.draft_steps import (
    LAST,
    NEW_BLOCKS,
    Accepted,
    DraftPasses,
    DraftRowState,
    VerifyBatch,
    VerifyInputs,
)
from chorale.kernels.reference.sampling.noise import position_keys


def verify_inputs(given: VerifyInputs, state: DraftRowState, batch: VerifyBatch) -> None:
    """Append new blocks to the tables, and write the inputs of model and sampler for N = R * S tokens."""
    places, count = given.token_ids.shape
    rows, offsets = given.rows.long(), torch.arange(places, device=given.rows.device)
    _append(given, state, rows)
    is_draft = given.token_ids <= DRAFT
    begins_on_device = is_draft[1] if places > 1 else is_draft[0]
    bases = torch.where(begins_on_device, state.last_position[rows], given.num_computed.long())
    which = (DRAFT - given.token_ids.long()).clamp(min=0)
    drafts = state.drafts[which, rows] if len(state.drafts) else which
    tokens = torch.where(is_draft, drafts, given.token_ids.long())
    tokens = torch.where(given.token_ids == LAST, state.last_token[rows], tokens)
    missing = offsets[:, None] > given.num_drafts
    tokens = torch.where(missing, tokens[0], tokens).t().flatten()
    positions = torch.where(missing, bases, bases + offsets[:, None]).t().flatten()
    missing, token_rows = missing.t().flatten(), rows.repeat_interleave(places)
    total = places * count
    batch.token_ids[:total] = tokens
    batch.positions[:total] = positions
    batch.context_lens[:total] = positions.int() + 1
    for group in range(2):
        tables = state.block_tables[group]
        blocks = torch.where(missing, state.dummy_block, tables[token_rows, positions // state.block_size])
        batch.slots[group, :total] = blocks.long() * state.block_size + positions % state.block_size
        batch.tables[group, :total] = tables[token_rows]
    sampled = positions + 1
    batch.keys[:total] = position_keys(state.key_bases[token_rows], sampled)
    floats = state.floats[token_rows]
    batch.temperature[:total] = floats[:, 0]
    batch.filters[:total] = floats[:, 1:]
    is_early = (sampled < state.may_stop_at[token_rows])[:, None]
    batch.early_stops[:total] = torch.where(is_early, state.stops[token_rows], -1)


def _append(given: VerifyInputs, state: DraftRowState, rows: torch.Tensor) -> None:
    for group in range(2):
        tables = state.block_tables[group]
        for number in range(NEW_BLOCKS):
            index = (given.first_new.long() + number).clamp(max=tables.shape[1] - 1)
            new = given.new_blocks[group, number]
            tables[rows, index] = torch.where(new < 0, tables[rows, index], new)


def accept(
    samples: torch.Tensor,
    batch: VerifyBatch,
    given: VerifyInputs,
    state: DraftRowState,
    accepted: Accepted,
    profile: torch.Tensor | None,
) -> None:
    """Keep the samples [N] of each row up to and including the first that differs from its draft.

    ``profile`` [K] float32: keep draft token j with probability ``profile[j]`` instead of comparing it.
    """
    places, count = given.token_ids.shape
    total, rows = places * count, given.rows.long()
    tokens = samples.view(count, places)
    drafts = batch.token_ids[:total].view(count, places)[:, 1:]
    offsets = torch.arange(places - 1, device=samples.device)
    equal = tokens[:, :-1] == drafts
    if profile is not None:
        words = batch.keys[:total, 1].view(count, places)[:, :-1].long() & 0xFFFFFFFF
        equal = words < profile[: places - 1] * 2.0**32
    equal &= offsets < given.num_drafts[:, None]
    num_accepted = equal.long().cumprod(1).sum(1)
    last = torch.arange(count, device=samples.device) * places + num_accepted
    kept = torch.arange(places, device=samples.device) <= num_accepted[:, None]
    accepted.tokens[:total] = torch.where(kept, tokens, REJECTED).flatten()
    accepted.following[:total] = samples.clamp(min=0)
    accepted.last_place[:count] = last
    state.last_token[rows] = samples[last].clamp(min=0)
    state.last_position[rows] = batch.positions[last] + 1


def draft_passes(rows: torch.Tensor, state: DraftRowState, passes: DraftPasses) -> None:
    """Write the inputs of the head's M passes for ``rows`` [R] int32."""
    count, longest = len(rows), len(passes.positions)
    own = rows.long()
    numbers = torch.arange(longest, device=rows.device)[:, None]
    drawn = state.last_position[own] + 1 + numbers  # [M, R]
    keys = position_keys(state.key_bases[own].expand(longest, count).flatten(), drawn.flatten())
    passes.keys[:, :count] = keys.view(longest, count, 2)
    passes.temperature[:count] = state.floats[own, 0]
    tables = state.block_tables[0, own]
    passes.tables[:count] = tables
    positions = drawn - 2
    passes.positions[:, :count] = positions
    passes.context_lens[:, :count] = positions.int() + 1
    blocks = tables.t().gather(0, (positions // state.block_size).clamp(0, tables.shape[1] - 1))
    passes.slots[:, :count] = blocks.long() * state.block_size + positions % state.block_size
