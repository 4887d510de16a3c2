"""Forward passes of small mixed steps in static memory, as graphs where there are graphs.

A step of a few hundred prompt tokens takes the device less time than the host needs to launch it kernel by
kernel. Such a plan is padded to a size for which there is a graph: a dummy row computes the tokens that are
missing, further dummy rows compute none. The step is laid out as any other; only the model's own part is
replayed. Sampling is the worker's business.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch

from chorale.engine.types import IntArray, StepPlan
from chorale.kernels.ops import AttentionMeta, ForwardBatch
from chorale.model.gpt_oss import GptOss
from chorale.runtime.buckets import MIXED_ROWS, MIXED_TOKENS, pick
from chorale.runtime.buffers import Buffers
from chorale.runtime.device import Device


def pad_plan(plan: StepPlan, num_tokens: int, num_rows: int, spare_row: int) -> StepPlan:
    """The plan with dummy rows at its end: the first computes what is missing to ``num_tokens``."""
    missing = num_rows - len(plan.rows)
    new = np.zeros(missing, np.int32)
    new[0] = num_tokens - plan.num_tokens
    return replace(
        plan,
        rows=_extended(plan.rows, np.full(missing, spare_row, np.int32)),
        num_computed=_extended(plan.num_computed, np.zeros(missing, np.int32)),
        num_new=_extended(plan.num_new, new),
        samples=np.concatenate((plan.samples, np.zeros(missing, np.bool_))),
        token_ids=_extended(plan.token_ids, np.zeros(new[0], np.int32)),
    )


def _extended(array: IntArray, more: IntArray) -> IntArray:
    return np.concatenate((array, more), dtype=np.int32)


def dummy_plan(num_tokens: int, spare_row: int) -> StepPlan:
    """One dummy row that computes ``num_tokens`` and samples none: to try a size out."""
    none = np.zeros(0, np.int32)
    empty = StepPlan(-1, (), none, none, none, np.zeros(0, np.bool_), none, none, none, none, none)
    return pad_plan(empty, num_tokens, 1, spare_row)


class Mixed:
    """The one owner of its static memory and graphs."""

    def __init__(
        self, device: Device, model: GptOss, kv: Sequence[torch.Tensor], buffers: Buffers, longest: int
    ) -> None:
        """``longest``: tokens of the longest sequence. No larger step is captured, because a dummy row may
        have to compute all of it. The dummy rows have the pool's last page alone.
        """
        self._device, self._model, self._kv, self._buffers = device, model, kv, buffers
        self._longest = longest
        self.sizes = tuple(size for size in MIXED_TOKENS if size <= longest)
        buffers.block_tables[:, buffers.spare_row] = kv[0].shape[0] - 1
        self._graphs: dict[tuple[int, int], Callable[[], None]] = {}
        tokens, rows = max(self.sizes, default=0), MIXED_ROWS[-1]

        def room(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device.torch_device)

        self._token_ids, self._positions, self._slots = room(tokens), room(tokens), room(2, tokens)
        self._query_start = room(rows + 1, dtype=torch.int32)
        self._context_lens = room(rows, dtype=torch.int32)
        self._tables = room(2, rows, buffers.block_tables.shape[2], dtype=torch.int32)
        self._hidden = room(tokens, model.config.hidden_size, dtype=torch.float32)

    @property
    def num_graphs(self) -> int:
        return len(self._graphs)

    def padded(self, plan: StepPlan) -> StepPlan | None:
        """The plan in a size for which there is a graph, or can be; None: too large."""
        if not self.sizes or plan.num_tokens > self.sizes[-1] or len(plan.rows) >= MIXED_ROWS[-1]:
            return None
        tokens, rows = pick(self.sizes, plan.num_tokens), pick(MIXED_ROWS, len(plan.rows) + 1)
        return pad_plan(plan, tokens, rows, self._buffers.spare_row)

    def hidden(self, batch: ForwardBatch) -> torch.Tensor:
        """[T, H] of a step whose plan ``padded`` made, until the next one."""
        tokens, rows = batch.token_ids.shape[0], batch.attention.context_lens.shape[0]
        replay = self.graph(tokens, rows)
        self._fill(batch, tokens, rows)
        replay()
        return self._hidden[:tokens]

    def graph(self, tokens: int, rows: int) -> Callable[[], None]:
        """Captured when first asked for."""
        found = self._graphs.get((tokens, rows))
        if found is None:
            dummies = pad_plan(
                dummy_plan(tokens, self._buffers.spare_row), tokens, rows, self._buffers.spare_row
            )
            self._fill(self._buffers.fill(dummies).forward, tokens, rows)
            found = self._graphs[tokens, rows] = self._device.capture(self._step(tokens, rows))
        return found

    def _fill(self, batch: ForwardBatch, tokens: int, rows: int) -> None:
        given = batch.attention
        self._token_ids[:tokens].copy_(batch.token_ids)
        self._positions[:tokens].copy_(given.positions)
        self._query_start[: rows + 1].copy_(given.query_start)
        self._context_lens[:rows].copy_(given.context_lens)
        for group in range(2):
            table = given.block_tables[group]
            self._slots[group, :tokens].copy_(given.slots[group])
            self._tables[group, :rows, : table.shape[1]].copy_(table)

    def _step(self, tokens: int, rows: int) -> Callable[[], None]:
        batch = ForwardBatch(
            token_ids=self._token_ids[:tokens],
            logits_index=self._token_ids[:0],
            attention=AttentionMeta(
                positions=self._positions[:tokens],
                query_start=self._query_start[: rows + 1],
                context_lens=self._context_lens[:rows],
                block_tables=(self._tables[0, :rows], self._tables[1, :rows]),
                slots=(self._slots[0, :tokens], self._slots[1, :tokens]),
                max_query_len=tokens,
                max_context_len=self._longest,
            ),
        )

        def step() -> None:
            self._hidden[:tokens].copy_(self._model.hidden(batch, self._kv))

        return step
