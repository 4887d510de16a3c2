"""Steps that verify drafts, in static memory: as ``steps/decode_graphs.py``, with several tokens per row.

Every row computes ``width`` tokens: its last token and the same number of draft tokens, of which some may be
unused. Model, sampling, acceptance and the head's next drafts are in the graph; the host packs 8 int32 per
row and one per token. Rows with logits processors, a grammar or log-probabilities do not run in these steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from chorale.engine.types import EARLY_STOPS, IntArray, StepPlan
from chorale.kernels.draft_steps import NEW_BLOCKS, Accepted, DraftRowState, VerifyBatch, VerifyInputs
from chorale.kernels.ops import SamplingInputs
from chorale.runtime.drafts.head_runner import HeadRunner, ReadTokens
from chorale.runtime.sizing.graph_sizes import context_sizes, draft_sizes, pick
from chorale.runtime.sizing.memory import LOGIT_ROWS
from chorale.runtime.steps.graphs import StepGraphs, StepParts, entries_of_appends, forward_batch

ROW, COMPUTED, NUM_DRAFTS, DRAFTING, FIRST_NEW, BLOCKS = range(6)
TOKENS = BLOCKS + 2 * NEW_BLOCKS  # the first of ``width`` columns


class VerifyGraphRunner(StepGraphs):
    """Runs steps that verify or make drafts."""

    def __init__(
        self,
        parts: StepParts,
        state: DraftRowState,
        head: HeadRunner | None,
        *,
        sizes: Sequence[int],
        most_drafts: int,
        longest: int,
        profile: torch.Tensor | None = None,
    ) -> None:
        """``sizes``: rows of the graphs; ``most_drafts``: maximum draft tokens per row. ``profile``: see
        ``Ops.accept``."""
        target, most_rows = parts.device.torch_device, sizes[-1]
        count, table_width = most_rows * (1 + most_drafts), parts.buffers.block_tables.shape[2]
        super().__init__(parts, most_rows * (TOKENS + 1 + most_drafts), count)
        self._state, self._head, self._longest = state, head, longest
        self._sizes, self._most_drafts = tuple(sizes), most_drafts
        self._profile = profile
        self.last_width = 0  # tokens of each row in the newest step

        def room(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=target)

        self._batch = VerifyBatch(
            token_ids=room(count),
            positions=room(count),
            context_lens=room(count, dtype=torch.int32),
            slots=room(2, count),
            tables=room(2, count, table_width, dtype=torch.int32),
            keys=room(count, 2, dtype=torch.int32),
            temperature=room(count, dtype=torch.float32),
            filters=room(count, 3, dtype=torch.float32),
            early_stops=room(count, EARLY_STOPS, dtype=torch.int32),
        )
        self._samples, self._unused = room(count), room(count)
        self._accepted = Accepted(room(count), room(count), room(most_rows))
        self._index = torch.arange(count, device=target)
        self._numbers = torch.arange(count, dtype=torch.int32, device=target)
        self._query_start = torch.arange(count + 1, dtype=torch.int32, device=target)
        self._aux = head.aux_states(count) if head is not None else None

    def takes(self, plan: StepPlan) -> bool:
        """Returns whether the plan can run as such a step."""
        if (plan.num_made < 0 and plan.num_drafts is None) or len(plan.rows) > self._sizes[-1]:
            return False
        drafts = plan.num_new - 1
        known = 0 if plan.num_drafts is None else plan.num_drafts
        return bool(
            plan.samples.all()
            and not plan.prompt_logprob_rows
            and (drafts == known).all()
            and drafts.max() <= self._most_drafts
            and not self._buffers.rows.needs_resampling[plan.rows].any()
        )

    def run(self, plan: StepPlan) -> Callable[[], npt.NDArray[np.int64]]:
        """Enqueue a step. Returns a function that waits for its samples [R * width]."""
        rows, longest = pick(self._sizes, len(plan.rows)), int((plan.num_computed + plan.num_new).max())
        filtered = bool(self._buffers.rows.filters[plan.rows].any())
        needed = max(int(plan.num_new.max()) - 1, plan.num_made, 1)
        width, longest = self._size_of(rows, needed, longest, filtered)
        self.last_width = width
        replay = self.graph(rows, width, longest, filtered)
        staging = self._replay(replay, plan, TOKENS + width, rows)
        return self._download(staging, self._accepted.tokens[: len(plan.rows) * width])

    def _pack(self, plan: StepPlan, columns: IntArray) -> bool:
        """Returns False if some row gains too many or non-adjacent blocks."""
        count, num_drafts = len(plan.rows), plan.num_new - 1
        self._pad(columns)
        columns[ROW, :count] = plan.rows
        columns[COMPUTED, :count] = plan.num_computed
        columns[NUM_DRAFTS, :count] = num_drafts
        if plan.makes is not None:
            columns[DRAFTING, :count] = np.where(plan.makes, plan.rows, self._buffers.spare_row)
        firsts = np.cumsum(plan.num_new) - plan.num_new
        for offset in range(len(columns) - TOKENS):
            columns[TOKENS + offset, :count] = plan.token_ids[firsts + np.minimum(offset, num_drafts)]
        if not len(plan.appends):
            return True
        entries, (group, _, index, block) = entries_of_appends(plan), plan.append_columns
        if (entries < 0).any():
            return False
        first = columns[FIRST_NEW]
        first[entries] = np.iinfo(np.int32).max
        np.minimum.at(first, entries, index)
        number = index - first[entries]
        if (number >= NEW_BLOCKS).any():
            return False
        columns[BLOCKS + group * NEW_BLOCKS + number, entries] = block
        return True

    def _pad(self, columns: IntArray) -> None:
        columns[:] = 0
        columns[BLOCKS:TOKENS] = -1
        columns[ROW] = columns[DRAFTING] = self._buffers.spare_row

    # ------------------------------------------------------------------ contents of a graph

    def _size_of(self, rows: int, needed: int, longest: int, filtered: bool) -> tuple[int, int]:
        """Return width and longest context of the graph for drafts of ``needed`` tokens. Prefers a larger
        captured graph, because every row waits for a capture."""
        sizes = [
            (1 + size, pick(context_sizes(rows * (1 + size), self._longest), longest))
            for size in draft_sizes(self._most_drafts)
            if size >= needed
        ]
        return next((size for size in sizes if (rows, *size, filtered) in self._graphs), sizes[0])

    def _fill_dummies(self, rows: int, width: int, *_: int) -> None:
        columns: IntArray = np.empty((TOKENS + width, rows), np.int32)
        self._pad(columns)
        self._inputs[: columns.size].copy_(self._device.upload(columns.ravel()))

    def _step(self, rows: int, width: int, longest: int, filtered: bool) -> Callable[[], None]:
        """Return the step of ``rows`` rows of ``width`` tokens. A head makes ``width`` - 1 draft tokens."""
        columns = self._inputs[: rows * (TOKENS + width)].view(TOKENS + width, rows)
        given = VerifyInputs(
            rows=columns[ROW],
            num_computed=columns[COMPUTED],
            num_drafts=columns[NUM_DRAFTS],
            token_ids=columns[TOKENS:],
            first_new=columns[FIRST_NEW],
            new_blocks=columns[BLOCKS:TOKENS].view(2, NEW_BLOCKS, rows),
        )
        count, drafting = rows * width, columns[DRAFTING]
        batch, ops = (
            forward_batch(self._batch, self._index[:count], self._query_start, longest),
            self._model.ops,
        )
        aux = None if self._aux is None else self._aux.first(count)
        samples = self._samples[:count]

        def step() -> None:
            ops.verify_inputs(given, self._state, self._batch)
            hidden = self._model.hidden(batch, self._kv, aux)
            self._sample(hidden, samples, filtered)
            ops.accept(samples, self._batch, given, self._state, self._accepted, self._profile)
            if self._head is not None and aux is not None:
                accepted = self._accepted
                read = ReadTokens(
                    aux.states,
                    accepted.following[:count],
                    batch.attention,
                    accepted.last_place[:rows],
                    drafting,
                )
                self._head.run(read, width - 1, longest)

        return step

    def _sample(self, hidden: torch.Tensor, samples: torch.Tensor, filtered: bool) -> None:
        batch, count = self._batch, len(samples)
        filters = batch.filters if filtered else None
        draws = SamplingInputs(
            batch.keys, batch.temperature, self._numbers, filters, early_stops=batch.early_stops
        )
        for first in range(0, count, LOGIT_ROWS):
            some = slice(first, min(first + LOGIT_ROWS, count))
            logits = self._model.logits(hidden, self._index[some])
            self._sampler.draw(logits, draws.at(some), self._unused, samples[some])
