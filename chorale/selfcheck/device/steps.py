"""Steps over one sequence in a paged cache: whole, in chunks, or some of its tokens as decoding rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from chorale.kernels.ops import AttentionMeta


@dataclass(frozen=True, slots=True)
class Step:
    """``tokens``: places in the sequence of the step's tokens. ``name``: for messages."""

    name: str
    tokens: torch.Tensor  # [T] int64
    meta: AttentionMeta


class PagedSequence:
    """Block tables of one sequence, shuffled, and others for each cache group."""

    def __init__(self, length: int, block_size: int, device: torch.device, seed: int = 0) -> None:
        self.length, self.block_size, self.device = length, block_size, device
        width = -(-length // block_size)
        self.num_blocks = 2 * width
        ids = torch.randperm(self.num_blocks, generator=torch.Generator().manual_seed(seed))
        self._tables = ids.int().view(2, 1, width).to(device)
        positions = torch.arange(length, device=device)
        blocks = self._tables[:, 0].long().index_select(1, positions // block_size)
        self.slots = blocks * block_size + positions % block_size  # [2, length]

    def pool(self, kv_heads: int, head_dim: int, dtype: torch.dtype) -> torch.Tensor:
        """An empty KV tensor."""
        shape = (self.num_blocks, 2, kv_heads, self.block_size, head_dim)
        return torch.zeros(shape, dtype=dtype, device=self.device)

    def write(self, kv: torch.Tensor, group: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Writes k and v [length, Nkv, D], whose values the pool's type can hold."""
        block, offset = self.slots[group] // self.block_size, self.slots[group] % self.block_size
        values = torch.stack((k, v), 1).to(kv.dtype)
        if kv.dtype == torch.float8_e4m3fn:  # torch has no indexing of it
            values, kv = values.view(torch.uint8), kv.view(torch.uint8)
        kv[block, :, :, offset] = values

    def read(self, kv: torch.Tensor, group: int, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns k and v of some tokens, [T, Nkv, D] float32."""
        slots = self.slots[group][tokens]
        octets = kv.view(torch.uint8) if kv.dtype == torch.float8_e4m3fn else kv
        found = octets[slots // self.block_size, :, :, slots % self.block_size].contiguous()
        found = found.view(kv.dtype).float()
        return found[:, 0], found[:, 1]

    def prompt(self, new: int | None = None) -> Step:
        """The last ``new`` tokens of the sequence (default: all) as one row."""
        new = new or self.length
        tokens = torch.arange(self.length - new, self.length, device=self.device)
        what = "prompt" if new == self.length else f"chunk after {self.length - new}"
        return self._step(f"{what} of {new} tokens", tokens, [new])

    def decodes(self, places: Sequence[int]) -> Step:
        """Tokens at ``places`` as rows of one new token each."""
        tokens = torch.tensor(places, device=self.device)
        return self._step(f"{len(places)} decoding rows", tokens, [1] * len(places))

    def _step(self, name: str, tokens: torch.Tensor, counts: list[int]) -> Step:
        ends = torch.tensor(counts, device=self.device).cumsum(0)
        contexts = tokens[ends - 1] + 1
        rows = len(counts)
        tables = tuple(table.expand(rows, -1).contiguous() for table in self._tables)
        slots = self.slots[:, tokens]
        meta = AttentionMeta(
            positions=tokens,
            query_start=torch.cat((ends.new_zeros(1), ends)).int(),
            context_lens=contexts.int(),
            block_tables=(tables[0], tables[1]),
            slots=(slots[0].contiguous(), slots[1].contiguous()),
            max_query_len=max(counts),
            max_context_len=int(contexts.max()),
        )
        return Step(name, tokens, meta)
