"""Small kernels of steps that verify drafts.

The specification is ``kernels/reference/sampling/draft_steps.py``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from chorale.engine.types import DRAFT, EARLY_STOPS, REJECTED
from chorale.kernels import draft_steps
from chorale.kernels.draft_steps import Accepted, DraftPasses, DraftRowState, VerifyBatch, VerifyInputs

_DRAFT, _LAST = tl.constexpr(DRAFT), tl.constexpr(draft_steps.LAST)
_REJECTED = tl.constexpr(REJECTED)
# The offsets of columns depend on the step's size; kernels are not specialised by their alignment.
_COLUMNS = ["rows_ptr", "computed_ptr", "num_drafts_ptr", "given_ptr", "first_new_ptr", "new_block_ptr"]


@triton.jit
def _position_key(base, position):
    """Return the two words of ``row_keys`` (``reference/sampling/noise.py``)."""
    z = base.to(tl.uint64, bitcast=True) + (position + 1).to(tl.uint64) * 0x9E3779B97F4A7C15
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    z = z ^ (z >> 31)
    low, high = z & 0xFFFFFFFF, z >> 32
    return low.to(tl.uint32).to(tl.int32, bitcast=True), high.to(tl.uint32).to(tl.int32, bitcast=True)


@triton.jit(do_not_specialize_on_alignment=_COLUMNS)
def _verify_inputs_kernel(
    rows_ptr,  # [R] int32
    computed_ptr,  # [R] int32
    num_drafts_ptr,  # [R] int32
    given_ptr,  # [S, R] int32
    first_new_ptr,  # [R] int32
    new_block_ptr,  # [2, 2, R] int32
    last_ptr,  # [rows] int64
    last_position_ptr,  # [rows] int64
    drafts_ptr,  # [K, rows] int64
    key_base_ptr,  # [rows] int64
    may_stop_ptr,  # [rows] int64
    stops_ptr,  # [rows, STOPS] int32
    floats_ptr,  # [rows, 4] float32
    row_tables_ptr,  # [2, rows, width] int32
    token_ptr,  # [N] int64
    position_ptr,  # [N] int64
    context_ptr,  # [N] int32
    slot_ptr,  # [2, N] int64
    table_ptr,  # [2, N, width] int32
    key_ptr,  # [N, 2] int32
    temperature_ptr,  # [N] float32
    filter_ptr,  # [N, 3] float32
    early_ptr,  # [N, STOPS] int32
    drafts_stride,
    row_tables_stride,
    slot_stride,
    table_stride,
    width,
    window,
    dummy_block,
    PLACES: tl.constexpr,
    KV_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
    STOPS: tl.constexpr,
):
    place, group = tl.program_id(0), tl.program_id(1)
    count = tl.num_programs(0) // PLACES
    entry, offset = place // PLACES, place % PLACES
    row = tl.load(rows_ptr + entry).to(tl.int64)
    missing = offset > tl.load(num_drafts_ptr + entry)
    own = tl.where(missing, 0, offset)
    given = tl.load(given_ptr + own * count + entry)
    second: tl.constexpr = 1 if PLACES > 1 else 0
    base = tl.load(computed_ptr + entry).to(tl.int64)
    if tl.load(given_ptr + second * count + entry) <= _DRAFT:
        base = tl.load(last_position_ptr + row)
    position = (base + own).to(tl.int32)
    if group == 0:
        token = given.to(tl.int64)
        if given == _LAST:
            token = tl.load(last_ptr + row)
        elif given <= _DRAFT:
            token = tl.load(drafts_ptr + (_DRAFT - given) * drafts_stride + row)
        tl.store(token_ptr + place, token)
        tl.store(position_ptr + place, position.to(tl.int64))
        tl.store(context_ptr + place, position + 1)
        _sampling_inputs(
            row, position + 1, place, key_base_ptr, may_stop_ptr, stops_ptr, floats_ptr,
            key_ptr, temperature_ptr, filter_ptr, early_ptr, STOPS,
        )  # fmt: skip
    mine = row_tables_ptr + group.to(tl.int64) * row_tables_stride + row * width
    new_index = tl.load(first_new_ptr + entry)
    new_0 = tl.load(new_block_ptr + (group * 2) * count + entry)
    new_1 = tl.load(new_block_ptr + (group * 2 + 1) * count + entry)
    if offset == 0:
        if new_0 >= 0:
            tl.store(mine + new_index, new_0)
        if new_1 >= 0:
            tl.store(mine + new_index + 1, new_1)
    last = position // KV_BLOCK
    first = 0
    if group == 1:
        first = tl.maximum(position - window + 1, 0) // KV_BLOCK
    table = table_ptr + group.to(tl.int64) * table_stride + place.to(tl.int64) * width
    for begin in range(first, last + 1, BLOCK):
        places = begin + tl.arange(0, BLOCK)
        inside = places <= last
        # Another program may still be storing the new blocks, so they are read from the inputs.
        blocks = tl.load(mine + places, mask=inside, other=0)
        blocks = tl.where((places == new_index) & (new_0 >= 0), new_0, blocks)
        blocks = tl.where((places == new_index + 1) & (new_1 >= 0), new_1, blocks)
        tl.store(table + places, blocks, mask=inside)
    block = tl.load(mine + last)
    if (last == new_index) & (new_0 >= 0):
        block = new_0
    if (last == new_index + 1) & (new_1 >= 0):
        block = new_1
    if missing:
        block = dummy_block
    tl.store(slot_ptr + group * slot_stride + place, block.to(tl.int64) * KV_BLOCK + position % KV_BLOCK)


@triton.jit
def _sampling_inputs(
    row, position, place, key_base_ptr, may_stop_ptr, stops_ptr, floats_ptr,
    key_ptr, temperature_ptr, filter_ptr, early_ptr, STOPS: tl.constexpr,
):  # fmt: skip
    """Store noise key and parameters of the token to be sampled at ``position``."""
    low, high = _position_key(tl.load(key_base_ptr + row), position)
    tl.store(key_ptr + place * 2, low)
    tl.store(key_ptr + place * 2 + 1, high)
    tl.store(temperature_ptr + place, tl.load(floats_ptr + row * 4))
    for which in tl.static_range(3):
        tl.store(filter_ptr + place * 3 + which, tl.load(floats_ptr + row * 4 + 1 + which))
    columns = tl.arange(0, STOPS)
    stops = tl.load(stops_ptr + row * STOPS + columns)
    stops = tl.where(position < tl.load(may_stop_ptr + row), stops, -1)
    tl.store(early_ptr + place * STOPS + columns, stops)


def verify_inputs(given: VerifyInputs, state: DraftRowState, batch: VerifyBatch) -> None:
    places, count = given.token_ids.shape
    _verify_inputs_kernel[(places * count, 2)](
        given.rows, given.num_computed, given.num_drafts, given.token_ids, given.first_new, given.new_blocks,
        state.last_token, state.last_position, state.drafts, state.key_bases, state.may_stop_at, state.stops,
        state.floats, state.block_tables,
        batch.token_ids, batch.positions, batch.context_lens, batch.slots, batch.tables, batch.keys,
        batch.temperature, batch.filters, batch.early_stops,
        state.drafts.stride(0), state.block_tables.stride(0), batch.slots.stride(0), batch.tables.stride(0),
        state.block_tables.shape[2], state.window, state.dummy_block,
        PLACES=places, KV_BLOCK=state.block_size, BLOCK=64, STOPS=EARLY_STOPS, num_warps=1,
    )  # fmt: skip


@triton.jit(do_not_specialize_on_alignment=["rows_ptr", "num_drafts_ptr"])
def _accept_kernel(
    sample_ptr,  # [N] int64
    token_ptr,  # [N] int64
    position_ptr,  # [N] int64
    key_ptr,  # [N, 2] int32
    rows_ptr,  # [R] int32
    num_drafts_ptr,  # [R] int32
    profile_ptr,  # [K] float32, or unused
    last_ptr,  # [rows] int64
    last_position_ptr,  # [rows] int64
    kept_ptr,  # [N] int64
    following_ptr,  # [N] int64
    last_place_ptr,  # [R] int64
    PLACES: tl.constexpr,
    HAS_PROFILE: tl.constexpr,
):
    entry = tl.program_id(0)
    row, num_drafts = tl.load(rows_ptr + entry).to(tl.int64), tl.load(num_drafts_ptr + entry)
    first = entry * PLACES
    num_kept = tl.full((), 1, tl.int32)
    for offset in tl.static_range(PLACES):
        place = first + offset
        sample = tl.load(sample_ptr + place)
        tl.store(following_ptr + place, tl.maximum(sample, 0))
        tl.store(kept_ptr + place, tl.where(offset < num_kept, sample, _REJECTED))
        if offset + 1 < PLACES:
            if HAS_PROFILE:
                word = tl.load(key_ptr + place * 2 + 1).to(tl.uint32, bitcast=True)
                equal = word.to(tl.float32) < tl.load(profile_ptr + offset) * 4294967296.0
            else:
                equal = sample == tl.load(token_ptr + place + 1)
            num_kept += (equal & (offset < num_drafts) & (num_kept == offset + 1)).to(tl.int32)
    last = first + num_kept - 1
    tl.store(last_place_ptr + entry, last.to(tl.int64))
    tl.store(last_ptr + row, tl.maximum(tl.load(sample_ptr + last), 0))
    tl.store(last_position_ptr + row, tl.load(position_ptr + last) + 1)


def accept(
    samples: torch.Tensor,
    batch: VerifyBatch,
    given: VerifyInputs,
    state: DraftRowState,
    accepted: Accepted,
    profile: torch.Tensor | None,
) -> None:
    places, count = given.token_ids.shape
    _accept_kernel[(count,)](
        samples, batch.token_ids, batch.positions, batch.keys, given.rows, given.num_drafts,
        batch.temperature if profile is None else profile, state.last_token, state.last_position,
        accepted.tokens, accepted.following, accepted.last_place,
        PLACES=places, HAS_PROFILE=profile is not None, num_warps=1,
    )  # fmt: skip


@triton.jit(do_not_specialize_on_alignment=["rows_ptr"])
def _draft_passes_kernel(
    rows_ptr,  # [R] int32
    last_position_ptr,  # [rows] int64
    key_base_ptr,  # [rows] int64
    floats_ptr,  # [rows, 4] float32
    row_tables_ptr,  # [2, rows, width] int32
    key_ptr,  # [M, size, 2] int32
    temperature_ptr,  # [size] float32
    position_ptr,  # [M, size] int64
    context_ptr,  # [M, size] int32
    slot_ptr,  # [M, size] int64
    table_ptr,  # [size, width] int32
    size,
    width,
    PASSES: tl.constexpr,
    KV_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    entry = tl.program_id(0)
    row = tl.load(rows_ptr + entry).to(tl.int64)
    at = tl.load(last_position_ptr + row)
    base = tl.load(key_base_ptr + row)
    tl.store(temperature_ptr + entry, tl.load(floats_ptr + row * 4))
    mine = row_tables_ptr + row * width
    for number in tl.static_range(PASSES):
        low, high = _position_key(base, at + 1 + number)
        place = number * size + entry
        tl.store(key_ptr + place * 2, low)
        tl.store(key_ptr + place * 2 + 1, high)
        position = at - 1 + number
        tl.store(position_ptr + place, position)
        tl.store(context_ptr + place, (position + 1).to(tl.int32))
        block = tl.load(mine + tl.minimum(tl.maximum(position, 0) // KV_BLOCK, width - 1))
        tl.store(slot_ptr + place, block.to(tl.int64) * KV_BLOCK + position % KV_BLOCK)
    last = tl.minimum((at - 1 + PASSES) // KV_BLOCK, width - 1)
    for begin in range(0, last + 1, BLOCK):
        places = begin + tl.arange(0, BLOCK)
        inside = places <= last
        blocks = tl.load(mine + places, mask=inside, other=0)
        tl.store(table_ptr + entry.to(tl.int64) * width + places, blocks, mask=inside)


def draft_passes(rows: torch.Tensor, state: DraftRowState, passes: DraftPasses) -> None:
    _draft_passes_kernel[(rows.shape[0],)](
        rows, state.last_position, state.key_bases, state.floats, state.block_tables,
        passes.keys, passes.temperature, passes.positions, passes.context_lens, passes.slots, passes.tables,
        passes.positions.shape[1], state.block_tables.shape[2],
        PASSES=passes.positions.shape[0], KV_BLOCK=state.block_size, BLOCK=64, num_warps=1,
    )  # fmt: skip
