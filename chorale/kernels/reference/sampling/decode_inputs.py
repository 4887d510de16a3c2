"""``Ops.decode_inputs`` in plain torch."""

from __future__ import annotations

import torch

from chorale.kernels.ops import DecodeInputs, DecodeState


def decode_inputs(given: DecodeInputs, state: DecodeState) -> None:
    """Write the model's input for a step of one new token per row, and append new blocks to the tables."""
    count, block_size = len(given.rows), state.block_size
    rows, positions = given.rows.long(), given.num_computed.long()
    known = given.token_ids.long()
    state.token_ids[:count] = torch.where(known < 0, state.last_token[rows], known)
    state.positions[:count] = positions
    state.context_lens[:count] = given.num_computed + 1
    blocks = positions // block_size
    for group in range(2):
        table, new = state.block_tables[group], given.new_blocks[group]
        block = torch.where(new < 0, table[rows, blocks], new)
        table[rows, blocks] = block
        state.slots[group, :count] = block.long() * block_size + positions % block_size
        state.tables[group, :count] = table[rows]
