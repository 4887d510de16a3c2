"""Decode steps in static memory: the contents of a graph, and the numbers that change between replays.

In such a step every row computes one token and samples the next. The host packs 19 int32 per row into pinned
memory and copies them in one transfer; everything else, from token ids to the sampled token, happens in the
graph. Rows that need more than temperature and filters (logits processors, a grammar, log-probabilities) are
sampled again afterwards.

Padding: dummy rows use an extra row of the buffers, whose one block is an extra block of the pool.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from chorale.engine.types import EARLY_STOPS, StepPlan
from chorale.kernels.adapters import NONE
from chorale.kernels.ops import DecodeInputs, DecodeState, SamplingInputs
from chorale.runtime.sizing.graph_sizes import context_sizes, pick
from chorale.runtime.sizing.memory import KEPT_ROWS, LOGIT_ROWS
from chorale.runtime.steps.graphs import (
    StagingBuffers,
    StepGraphs,
    StepParts,
    entries_of_appends,
    forward_batch,
)

ROW, COMPUTED, TOKEN, FULL_BLOCK, WINDOW_BLOCK, KEY_A, KEY_B, TEMPERATURE, TOP_K, TOP_P, MIN_P = range(11)
STOPS = 11  # the first of EARLY_STOPS columns
NUM_COLUMNS = STOPS + EARLY_STOPS
# Batches of more than ``MANY_ROWS`` rows run in a captured size up to ``NEAR`` times theirs for ``PATIENCE``
# steps before their own size is captured: in large steps a dummy row costs little, and a capture costs as
# much as many dummy rows.
MANY_ROWS, NEAR, PATIENCE = 8, 1.5, 64
Int32 = npt.NDArray[np.int32]


def is_decode(plan: StepPlan) -> bool:
    """Returns whether every row computes one token and samples the next, and no head runs."""
    return (
        plan.num_made < 0
        and plan.num_tokens == len(plan.rows)
        and not plan.prompt_logprob_rows
        and bool(plan.samples.all())
    )


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """An enqueued step of ``count`` rows, run in capture size ``size``."""

    staging: StagingBuffers
    count: int
    size: int
    reach: int = NONE  # what its adapters change


class DecodeGraphRunner(StepGraphs):
    """``launch`` enqueues a step; its result is in ``tokens``."""

    def __init__(self, parts: StepParts, sizes: Sequence[int], longest: int) -> None:
        """``sizes``: rows of the graphs; ``longest``: tokens of the longest sequence."""
        self.most_rows = rows = sizes[-1]
        super().__init__(parts, NUM_COLUMNS * rows, rows)
        self._sizes, self._longest = tuple(sizes), longest
        buffers, model = parts.buffers, parts.model
        buffers.block_tables[:, buffers.spare_row, 0] = parts.kv[0].shape[0] - 1
        self._padding: Int32 = np.zeros((NUM_COLUMNS, 1), np.int32)
        self._padding[ROW] = buffers.spare_row
        self._padding[FULL_BLOCK : WINDOW_BLOCK + 1] = -1
        self._padding[STOPS:] = -1
        self._padding[TOP_P] = np.float32(1).view(np.int32)
        self._padding[TOP_K] = np.float32(2**24).view(np.int32)
        # (size, filtered, reach) -> steps that ran in a larger size instead.
        self._stand_ins: Counter[tuple[int, bool, int]] = Counter()
        target, width = parts.device.torch_device, buffers.block_tables.shape[2]
        self._state = DecodeState(
            last_token=buffers.last_token,
            block_tables=buffers.block_tables,
            token_ids=torch.zeros(rows, dtype=torch.int64, device=target),
            positions=torch.zeros(rows, dtype=torch.int64, device=target),
            context_lens=torch.zeros(rows, dtype=torch.int32, device=target),
            slots=torch.zeros(2, rows, dtype=torch.int64, device=target),
            tables=torch.zeros(2, rows, width, dtype=torch.int32, device=target),
            block_size=buffers.block_size,
            window=model.config.sliding_window,
        )
        self._query_start = torch.arange(rows + 1, dtype=torch.int32, device=target)
        self._index = torch.arange(rows, dtype=torch.int64, device=target)
        self.tokens = torch.zeros(rows, dtype=torch.int64, device=target)
        kept = min(rows, KEPT_ROWS)
        self._logits = torch.zeros(kept, model.config.vocab_size, device=target)
        self._hidden = torch.zeros(rows if rows > kept else 0, model.config.hidden_size, device=target)

    def takes(self, plan: StepPlan) -> bool:
        return len(plan.rows) <= self.most_rows and is_decode(plan)

    # ------------------------------------------------------------------ a step

    def launch(self, plan: StepPlan, reach: int = NONE) -> LaunchedStep:
        """Enqueue a step without its download. ``tokens`` then holds [rows] on the device."""
        filtered = bool(self._buffers.rows.filters[plan.rows].any())
        size = self._size_for(len(plan.rows), filtered, reach)
        longest = int(plan.num_computed.max()) + 1
        replay = self.graph(size, pick(context_sizes(size, self._longest), longest), filtered, reach)
        return LaunchedStep(self._replay(replay, plan, NUM_COLUMNS, size), len(plan.rows), size, reach)

    def _pack(self, plan: StepPlan, columns: Int32) -> bool:
        """Returns False if some new block does not hold its row's new token."""
        count, rows, computed = len(plan.rows), plan.rows, plan.num_computed
        columns[:] = self._padding
        columns[ROW, :count] = rows
        columns[COMPUTED, :count] = computed
        columns[TOKEN, :count] = plan.token_ids
        positions, state = computed.astype(np.int64) + 1, self._buffers.rows
        columns[KEY_A : KEY_B + 1, :count] = state.keys(rows, positions).T
        columns[STOPS:, :count] = state.early_stops(rows, positions).T
        columns[TEMPERATURE:STOPS, :count] = state.floats(rows).view(np.int32)
        if not len(plan.appends):
            return True
        entries, (group, _, index, block) = entries_of_appends(plan), plan.append_columns
        usual = (entries >= 0) & (index == computed[entries] // self._buffers.block_size)
        if not usual.all():
            return False
        columns[FULL_BLOCK + group, entries] = block
        return True

    def _size_for(self, count: int, filtered: bool, reach: int) -> int:
        """Return the next larger size, or a near captured size for the first steps that would need a capture.

        Capturing takes as long as several steps, and every row waits. A batch whose requests end one after
        the other has a size for only a few steps and would pay for each capture.
        """
        size = pick(self._sizes, count)
        if size <= MANY_ROWS or (size, self._longest, filtered, reach) in self._graphs:
            return size
        for larger in self._sizes[bisect_right(self._sizes, size) :]:
            if larger <= size * NEAR and (larger, self._longest, filtered, reach) in self._graphs:
                self._stand_ins[size, filtered, reach] += 1
                return larger if self._stand_ins[size, filtered, reach] <= PATIENCE else size
        return size

    def collect(self, launch: LaunchedStep) -> Callable[[], npt.NDArray[np.int64]]:
        """Enqueue the download of the tokens. Returns a function that waits for them; call it once."""
        return self._download(launch.staging, self.tokens[: launch.count])

    def logits(self, launch: LaunchedStep, some: slice, index: torch.Tensor | None) -> torch.Tensor:
        """Return logits [L, V] float32 of the last launched step for rows ``index[some]``, [L] int64, or for
        rows ``some`` if ``index`` is None. Read only."""
        if launch.size > len(self._logits):
            rows = self._index[: launch.count] if index is None else index
            own = self._adapters_of(launch.size, launch.reach)
            return self._model.logits(self._hidden, rows[some], own)
        if index is None:
            return self._logits[: launch.count][some]
        return self._logits.index_select(0, index[some])

    # ------------------------------------------------------------------ contents of a graph

    def _adapters_of(self, size: int, reach: int) -> Any:
        """Return the adapters of the step's rows. Runs on the device only."""
        if self._adapters is None:
            return None
        return self._adapters.of_rows(self._inputs[ROW * size : (ROW + 1) * size], reach)

    def _fill_dummies(self, size: int, *_: int) -> None:
        columns = np.repeat(self._padding, size, axis=1)
        self._inputs[: columns.size].copy_(self._device.upload(columns.ravel()))

    def _step(self, size: int, longest: int, filtered: bool, reach: int) -> Callable[[], None]:
        """Return the step of ``size`` rows with contexts of at most ``longest``. ``filtered``: rows may have
        filters. ``reach``: what their adapters may change."""
        columns = self._inputs[: NUM_COLUMNS * size].view(NUM_COLUMNS, size)
        given = DecodeInputs(columns[ROW], columns[COMPUTED], columns[TOKEN], columns[FULL_BLOCK:KEY_A])
        keys, floats = columns[KEY_A : KEY_B + 1].t(), columns[TEMPERATURE:STOPS].view(torch.float32)
        filters, stops = floats[1:].t() if filtered else None, columns[STOPS:].t()
        draws = SamplingInputs(keys, floats[0], columns[ROW], filters, early_stops=stops)
        batch = forward_batch(self._state, self._index[:size], self._query_start, longest)
        decode_inputs = self._model.ops.decode_inputs

        def step() -> None:
            decode_inputs(given, self._state)
            adapters = self._adapters_of(size, reach)
            hidden = self._model.hidden(replace(batch, adapters=adapters), self._kv)
            for first in range(0, size, LOGIT_ROWS):
                some = slice(first, min(first + LOGIT_ROWS, size))
                logits = self._model.logits(hidden, self._index[some], adapters)
                self._sampler.draw(logits, draws.at(some), self._buffers.last_token, self.tokens[some])
            if size <= len(self._logits):
                self._logits[:size].copy_(logits)
            else:
                self._hidden[:size].copy_(hidden)

        return step
