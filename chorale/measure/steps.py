"""Engine steps over sequences in a paged KV cache: all tokens, the last sequence's end, or decoding rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from chorale.kernels.ops import AttentionMeta
from chorale.model.config import ModelConfig


@dataclass(frozen=True, slots=True)
class Step:
    """One step. ``tokens``: indices into the concatenated sequences. ``name``: for messages."""

    name: str
    tokens: torch.Tensor  # [T] int64
    meta: AttentionMeta


class PagedSequences:
    """Sequences in shuffled blocks of a KV cache. The two cache groups share no blocks."""

    def __init__(self, lengths: Sequence[int], block_size: int, device: torch.device) -> None:
        self._lengths, self._block_size, self._device = list(lengths), block_size, device
        counts = [-(-length // block_size) for length in lengths]
        self.num_blocks = 2 * sum(counts)
        ids = torch.randperm(self.num_blocks, generator=torch.Generator().manual_seed(0)).int().view(2, -1)
        tables = torch.zeros(2, len(counts), max(counts), dtype=torch.int32)
        for row, (end, count) in enumerate(zip(accumulate(counts), counts, strict=True)):
            tables[:, row, :count] = ids[:, end - count : end]
        self._tables = tables.to(device)
        self._rows = torch.arange(len(counts)).repeat_interleave(torch.tensor(lengths)).to(device)
        self._positions = torch.cat([torch.arange(length) for length in lengths]).to(device)
        blocks = self._tables[:, self._rows, self._positions // block_size].long()
        self._slots = blocks * block_size + self._positions % block_size  # [2, all tokens]

    def pool(self, config: ModelConfig, dtype: torch.dtype) -> torch.Tensor:
        """Returns a KV tensor of zeros for one layer: [blocks, 2, KV heads, block size, head_dim]."""
        shape = (self.num_blocks, 2, config.num_key_value_heads, self._block_size, config.head_dim)
        return torch.zeros(shape, dtype=dtype, device=self._device)

    def whole(self) -> Step:
        tokens = torch.arange(sum(self._lengths), device=self._device)
        return self._step(f"prompt of {len(tokens)} tokens", tokens, self._lengths)

    def end(self, new: int) -> Step:
        total = sum(self._lengths)
        tokens = torch.arange(total - new, total, device=self._device)
        return self._step(f"chunk of {new} tokens", tokens, [new])

    def decodes(self, indices: Sequence[int]) -> Step:
        tokens = torch.tensor(indices, device=self._device)
        return self._step(f"{len(indices)} decoding rows", tokens, [1] * len(indices))

    def _step(self, name: str, tokens: torch.Tensor, counts: list[int]) -> Step:
        ends = torch.tensor(counts, device=self._device).cumsum(0)
        last = tokens[ends - 1]
        contexts = self._positions[last] + 1
        tables, slots = self._tables[:, self._rows[last]], self._slots[:, tokens]
        meta = AttentionMeta(
            positions=self._positions[tokens],
            query_start=torch.cat((ends.new_zeros(1), ends)).int(),
            context_lens=contexts.int(),
            block_tables=(tables[0], tables[1]),
            slots=(slots[0], slots[1]),
            max_query_len=max(counts),
            max_context_len=int(contexts.max()),
        )
        return Step(name, tokens, meta)
