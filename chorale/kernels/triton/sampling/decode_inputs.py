"""The first kernel of a decode step: expands a few numbers per row into the model's inputs.

There is one program for each row and cache group. The inputs contain the ids of new blocks: only this kernel
appends to block tables during a decode step.
"""

from __future__ import annotations

import triton
import triton.language as tl

from chorale.kernels.ops import DecodeInputs, DecodeState

# The offsets of columns depend on the step's size; kernels are not specialised by their alignment.
_COLUMNS = ["rows_ptr", "computed_ptr", "new_token_ptr", "new_block_ptr"]


@triton.jit(do_not_specialize_on_alignment=_COLUMNS)
def _decode_inputs_kernel(
    rows_ptr,  # [N] int32
    computed_ptr,  # [N] int32
    new_token_ptr,  # [N] int32
    new_block_ptr,  # [2, N] int32
    last_ptr,  # [rows] int64
    row_tables_ptr,  # [2, rows, width] int32
    token_ptr,  # [N] int64
    position_ptr,  # [N] int64
    context_ptr,  # [N] int32
    slot_ptr,  # [2, N] int64
    table_ptr,  # [2, N, width] int32
    row_tables_stride,
    slot_stride,
    table_stride,
    width,
    window,
    KV_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    entry, group = tl.program_id(0), tl.program_id(1)
    count = tl.num_programs(0)
    row = tl.load(rows_ptr + entry).to(tl.int64)
    position = tl.load(computed_ptr + entry)
    if group == 0:
        token = tl.load(new_token_ptr + entry).to(tl.int64)
        token = tl.where(token < 0, tl.load(last_ptr + row), token)
        tl.store(token_ptr + entry, token)
        tl.store(position_ptr + entry, position.to(tl.int64))
        tl.store(context_ptr + entry, position + 1)
    mine = row_tables_ptr + group.to(tl.int64) * row_tables_stride + row * width
    last = position // KV_BLOCK
    block = tl.load(new_block_ptr + group * count + entry)
    if block >= 0:
        tl.store(mine + last, block)
    else:
        block = tl.load(mine + last)
    tl.store(slot_ptr + group * slot_stride + entry, block.to(tl.int64) * KV_BLOCK + position % KV_BLOCK)
    first = 0
    if group == 1:
        first = tl.maximum(position - window + 1, 0) // KV_BLOCK
    table = table_ptr + group.to(tl.int64) * table_stride + entry.to(tl.int64) * width
    for begin in range(first, last, BLOCK):
        places = begin + tl.arange(0, BLOCK)
        inside = places < last
        tl.store(table + places, tl.load(mine + places, mask=inside, other=0), mask=inside)
    tl.store(table + last, block)


def decode_inputs(given: DecodeInputs, state: DecodeState) -> None:
    _decode_inputs_kernel[(given.rows.shape[0], 2)](
        given.rows, given.num_computed, given.token_ids, given.new_blocks,
        state.last_token, state.block_tables, state.token_ids, state.positions, state.context_lens,
        state.slots, state.tables,
        state.block_tables.stride(0), state.slots.stride(0), state.tables.stride(0),
        state.block_tables.shape[2], state.window, KV_BLOCK=state.block_size, BLOCK=64, num_warps=1,
    )  # fmt: skip
