"""``Ops.decode_inputs`` in plain torch."""

from __future__ import annotations

import torch

from chorale.kernels.ops import DecodeInputs, DecodeState


def decode_inputs(given: DecodeInputs, state: DecodeState) -> None:
    """Write what the model reads in a step of one new token a row, and append new pages to the tables."""
    count, page_size = len(given.rows), state.block_size
    rows, positions = given.rows.long(), given.num_computed.long()
    known = given.token_ids.long()
    state.token_ids[:count] = torch.where(known < 0, state.last_token[rows], known)
    state.positions[:count] = positions
    state.context_lens[:count] = given.num_computed + 1
    pages = positions // page_size
    for group in range(2):
        table, new = state.block_tables[group], given.new_pages[group]
        page = torch.where(new < 0, table[rows, pages], new)
        table[rows, pages] = page
        state.slots[group, :count] = page.long() * page_size + positions % page_size
        state.tables[group, :count] = table[rows]
