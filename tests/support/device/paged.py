"""A tiny paged runner for tests: sequences in a KV pool with shuffled block ids, run in any chunking.

It replaces the runtime (block tables, slots, metas) with as little code as possible, and is as hostile as the
contract allows: blocks behind the window are freed and their table entries set to an id out of range.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import torch

from chorale.kernels.adapters import Adapter, AdapterBatch
from chorale.kernels.ops import AttentionMeta, ForwardBatch
from chorale.model.gpt_oss import GptOss

FREED = -(10**6)  # reading a table entry with this id fails


@dataclass
class Sequence:
    tokens: list[int]
    computed: int = 0
    adapter: Adapter | None = None
    tables: tuple[list[int], list[int]] = field(default_factory=lambda: ([], []))


class PagedRunner:
    def __init__(
        self,
        model: GptOss,
        *,
        block_size: int = 16,
        num_blocks: int = 512,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
    ) -> None:
        config = model.config
        self.model = model
        self.block_size = block_size
        shape = (num_blocks, 2, config.num_key_value_heads, block_size, config.head_dim)
        self.kv = [torch.zeros(shape, dtype=dtype) for _ in range(config.num_kv_tensors)]
        self.free = list(range(num_blocks))
        random.Random(seed).shuffle(self.free)

    def poison_free_blocks(self) -> None:
        """Fill free blocks with NaN, because free cells may contain any value."""
        for pool in self.kv:
            pool[self.free] = torch.nan

    def step(self, work: list[tuple[Sequence, int]]) -> list[torch.Tensor]:
        """Compute ``n`` more tokens of each sequence; returns the logits [n, V] of each."""
        for sequence, count in work:
            self._make_room(sequence, sequence.computed + count)
        logits = self.model.forward(self._batch(work), self.kv)
        for sequence, count in work:
            sequence.computed += count
        return list(logits.split([count for _, count in work]))

    def run(
        self, tokens: list[int], chunk: int | None = None, adapter: Adapter | None = None
    ) -> torch.Tensor:
        """Returns the logits [len(tokens), V] of one sequence, computed in chunks."""
        sequence = Sequence(tokens, adapter=adapter)
        out = []
        while sequence.computed < len(tokens):
            out += self.step([(sequence, min(chunk or len(tokens), len(tokens) - sequence.computed))])
        self.release(sequence)
        return torch.cat(out)

    def release(self, sequence: Sequence) -> None:
        for table in sequence.tables:
            self.free += [block for block in table if block != FREED]
            table.clear()

    def _make_room(self, sequence: Sequence, length: int) -> None:
        full, window = sequence.tables
        for table in (full, window):
            while len(table) * self.block_size < length:
                table.append(self.free.pop())
        # The oldest key that this step still needs is at computed - window + 1.
        behind = max(0, sequence.computed - self.model.config.sliding_window + 1) // self.block_size
        for block in range(behind):
            if window[block] != FREED:
                self.free.insert(0, window[block])
                window[block] = FREED

    def _batch(self, work: list[tuple[Sequence, int]]) -> ForwardBatch:
        counts = [count for _, count in work]
        positions = [torch.arange(s.computed, s.computed + n) for s, n in work]
        widest = max(len(s.tables[0]) for s, _ in work)
        tables, slots = [], []
        for group in (0, 1):
            rows = [s.tables[group] + [FREED] * (widest - len(s.tables[group])) for s, _ in work]
            table = torch.tensor(rows, dtype=torch.int32)
            tables.append(table)
            blocks = [table[i].long()[p // self.block_size] for i, p in enumerate(positions)]
            slots.append(torch.cat(blocks) * self.block_size + torch.cat(positions) % self.block_size)
        contexts = [s.computed + n for s, n in work]
        meta = AttentionMeta(
            positions=torch.cat(positions),
            query_start=torch.tensor([0, *counts]).cumsum(0).int(),
            context_lens=torch.tensor(contexts, dtype=torch.int32),
            block_tables=(tables[0], tables[1]),
            slots=(slots[0], slots[1]),
            max_query_len=max(counts),
            max_context_len=max(contexts),
        )
        tokens = [t for s, n in work for t in s.tokens[s.computed : s.computed + n]]
        adapters = adapters_of([(s.adapter, n) for s, n in work])
        return ForwardBatch(torch.tensor(tokens), torch.arange(len(tokens)), meta, adapters)


def adapters_of(rows: list[tuple[Adapter | None, int]]) -> AdapterBatch | None:
    """Returns the adapters of a step's tokens, from each row's adapter and number of tokens."""
    own = [adapter for adapter, count in rows for _ in range(count)]
    found = {id(adapter): adapter for adapter in own if adapter is not None}
    slots = {key: slot for slot, key in enumerate(found)}
    given = torch.tensor([slots.get(id(adapter), -1) for adapter in own])
    groups = tuple((found[key], (given == slot).nonzero().squeeze(1)) for key, slot in slots.items())
    return AdapterBatch(given, groups) if groups else None
