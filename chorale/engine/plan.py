"""PlanBuilder: collects the entries of one step and turns them into a StepPlan of arrays."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from chorale.engine.sequence import NO_TOKENS, Sequence
from chorale.engine.types import CacheGroup, IntArray, RowStart, StepPlan, Transfers

FULL, WINDOW = int(CacheGroup.FULL), int(CacheGroup.WINDOW)


@dataclass(frozen=True, slots=True)
class PlannedDrafts:
    """Drafts of a step. ``tokens``: row -> draft tokens, best key first."""

    tokens: dict[int, IntArray] = field(default_factory=dict)
    waiting: list[int] = field(default_factory=list)  # decoding rows that this step leaves out
    num_made: int = -1  # as in ``StepPlan``
    making: frozenset[int] = frozenset()  # rows that get new drafts


NO_DRAFTS = PlannedDrafts()


@dataclass(slots=True)
class ScheduledChunk:
    """A prefill chunk: ``count`` of the sequence's ``tokens_to_compute``, beginning at ``start``."""

    sequence: Sequence
    start: int
    count: int
    scored: bool = False  # each of its positions gets log-probabilities

    @property
    def is_last(self) -> bool:
        return self.start + self.count == len(self.sequence.tokens_to_compute)


@dataclass(slots=True)
class StepRecord:
    """A step in flight: its plan, and later changes of its rows."""

    plan: StepPlan
    num_decodes: int  # number of decoding entries, which come first
    chunks: list[ScheduledChunk]  # the entries after them
    dead_rows: set[int] = field(default_factory=set)  # ended or preempted meanwhile: results are dropped
    retiring: list[int] = field(default_factory=list)  # rows to release when this step is committed
    num_batch: int = 0  # decoding rows of batch work


class PlanBuilder:
    """The scheduler fills it; ``build`` returns the plan and empties it."""

    __slots__ = ("_appends", "chunks", "starts")

    def __init__(self) -> None:
        self.starts: list[RowStart] = []
        self.chunks: list[ScheduledChunk] = []
        self._appends: list[int] = []  # flat: group, row, logical block, block

    def append_blocks(self, sequence: Sequence, first: int) -> None:
        """Add the sequence's blocks of both groups, beginning at logical block ``first``."""
        blocks, row = sequence.blocks, sequence.row
        appends, window_start = self._appends, blocks.window_start
        for index in range(first, len(blocks.full)):
            appends += (FULL, row, index, blocks.full[index])
            if index >= window_start:
                appends += (WINDOW, row, index, blocks.window[index - window_start])

    def drop(self, row: int) -> None:
        """Remove all entries of a row whose sequence was preempted before the plan was built."""
        self.starts = [start for start in self.starts if start.row != row]
        self.chunks = [chunk for chunk in self.chunks if chunk.sequence.row != row]
        table = np.array(self._appends, np.int32).reshape(-1, 4)
        self._appends = table[table[:, 1] != row].ravel().tolist()

    def build(
        self,
        step_id: int,
        decodes: IntArray,
        computed: IntArray,
        tokens: IntArray,
        wants_prompt: list[int],
        planned: PlannedDrafts,
        transfers: Transfers | None = None,
    ) -> StepPlan:
        """Build the plan. ``decodes``, ``computed``, ``tokens``: rows, positions and ids of the decoding
        entries, those with ``planned`` drafts last."""
        drafts = planned.tokens
        num_decodes, num_rows = len(decodes), len(decodes) + len(self.chunks)
        num_new = np.ones(num_rows, np.int32)
        num_drafts: IntArray | None = None
        if drafts:
            num_drafts = np.zeros(num_rows, np.int32)
            num_drafts[num_decodes - len(drafts) : num_decodes] = [
                len(drafts[row]) for row in decodes[num_decodes - len(drafts) :].tolist()
            ]
            num_new += num_drafts
            tokens = _with_drafts(decodes, tokens, drafts)
        samples = np.ones(num_rows, np.bool_)
        rows = decodes
        if self.chunks:
            rows = _extended(decodes, [chunk.sequence.row for chunk in self.chunks])
            computed = _extended(computed, [chunk.start for chunk in self.chunks])
            num_new[num_decodes:] = [chunk.count for chunk in self.chunks]
            samples[num_decodes:] = [chunk.is_last for chunk in self.chunks]
            parts = [
                chunk.sequence.tokens_to_compute[chunk.start : chunk.start + chunk.count]
                for chunk in self.chunks
            ]
            tokens = np.concatenate([tokens, *parts])
        appends = NO_TOKENS
        if self._appends:
            appends = np.array(self._appends, np.int32).reshape(-1, 4).T.ravel()
        plan = StepPlan(
            step_id=step_id,
            starts=tuple(self.starts),
            rows=rows,
            num_computed=computed,
            num_new=num_new,
            samples=samples,
            token_ids=tokens,
            appends=appends,
            prompt_logprob_rows=frozenset(wants_prompt),
            num_drafts=num_drafts,
            num_made=planned.num_made,
            makes=None if planned.num_made < 0 else np.isin(rows, list(planned.making)),
            following=None if planned.num_made < 0 else self._following(num_decodes),
            transfers=transfers,
        )
        self.starts, self.chunks, self._appends = [], [], []
        return plan

    def _following(self, num_decodes: int) -> IntArray:
        """Return the prompt token after each entry, -1 if it is sampled."""
        after = [
            -1 if chunk.is_last else chunk.sequence.tokens_to_compute[chunk.start + chunk.count]
            for chunk in self.chunks
        ]
        return np.array([-1] * num_decodes + after, np.int32)


def _with_drafts(decodes: IntArray, tokens: IntArray, drafts: Mapping[int, IntArray]) -> IntArray:
    """Return the tokens of decoding entries, each followed by its draft."""
    num_plain = len(decodes) - len(drafts)
    parts = [tokens[:num_plain]]
    for entry, row in enumerate(decodes[num_plain:].tolist(), num_plain):
        parts += (tokens[entry : entry + 1], drafts[row])
    return np.concatenate(parts, dtype=np.int32)


def _extended(array: IntArray, more: list[int]) -> IntArray:
    return np.concatenate([array, np.array(more, np.int32)])
