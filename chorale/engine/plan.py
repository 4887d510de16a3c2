"""PlanBuilder: collects what one step will do, and turns it into a StepPlan of arrays."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from chorale.engine.sequence import NO_TOKENS, Sequence
from chorale.engine.types import CacheGroup, IntArray, RowStart, StepPlan

FULL, WINDOW = int(CacheGroup.FULL), int(CacheGroup.WINDOW)


@dataclass(slots=True)
class Grant:
    """A prefill chunk: ``count`` known tokens of ``sequence`` from ``start`` on."""

    sequence: Sequence
    start: int
    count: int
    scored: bool = False  # each of its positions gets log-probabilities

    @property
    def is_last(self) -> bool:
        return self.start + self.count == len(self.sequence.known)


@dataclass(slots=True)
class StepRecord:
    """A step in flight: its plan, and what happened to its rows since it was made."""

    plan: StepPlan
    num_decodes: int  # the first entries
    grants: list[Grant]  # the entries after them
    started: float  # clock
    dead_rows: set[int] = field(default_factory=set)  # ended or preempted since: results are dropped
    retiring: list[int] = field(default_factory=list)  # rows to release when this step is committed


class PlanBuilder:
    """Filled by the scheduler between two plans; ``build`` empties it."""

    __slots__ = ("_appends", "grants", "starts")

    def __init__(self) -> None:
        self.starts: list[RowStart] = []
        self.grants: list[Grant] = []
        self._appends: list[int] = []  # flat: row, group, logical page, block

    def append_pages(self, sequence: Sequence, first: int) -> None:
        """The pages of both groups from logical page ``first`` on, where they are still held."""
        pages, row = sequence.pages, sequence.row
        appends, window_start = self._appends, pages.window_start
        for index in range(first, len(pages.full)):
            appends += (row, FULL, index, pages.full[index])
            if index >= window_start:
                appends += (row, WINDOW, index, pages.window[index - window_start])

    def drop(self, row: int) -> None:
        """The row's sequence was preempted before the plan was built: forget all of it."""
        self.starts = [start for start in self.starts if start.row != row]
        self.grants = [grant for grant in self.grants if grant.sequence.row != row]
        table = np.array(self._appends, np.int32).reshape(-1, 4)
        self._appends = table[table[:, 0] != row].ravel().tolist()

    def build(
        self, step_id: int, decodes: IntArray, computed: IntArray, tokens: IntArray, wants_prompt: list[int]
    ) -> StepPlan:
        """``decodes``, ``computed``, ``tokens``: rows, positions and ids of the decoding entries."""
        num_decodes, num_rows = len(decodes), len(decodes) + len(self.grants)
        num_new = np.ones(num_rows, np.int32)
        samples = np.ones(num_rows, np.bool_)
        rows = decodes
        if self.grants:
            rows = _extended(decodes, [grant.sequence.row for grant in self.grants])
            computed = _extended(computed, [grant.start for grant in self.grants])
            num_new[num_decodes:] = [grant.count for grant in self.grants]
            samples[num_decodes:] = [grant.is_last for grant in self.grants]
            chunks = [grant.sequence.known[grant.start : grant.start + grant.count] for grant in self.grants]
            tokens = np.concatenate([tokens, *chunks])
        columns = [NO_TOKENS] * 4
        if self._appends:
            table = np.array(self._appends, np.int32).reshape(-1, 4).T
            columns = list(np.ascontiguousarray(table))
        plan = StepPlan(
            step_id=step_id,
            starts=tuple(self.starts),
            rows=rows,
            num_computed=computed,
            num_new=num_new,
            samples=samples,
            token_ids=tokens,
            append_row=columns[0],
            append_group=columns[1],
            append_index=columns[2],
            append_block=columns[3],
            prompt_logprob_rows=frozenset(wants_prompt),
        )
        self.starts, self.grants, self._appends = [], [], []
        return plan


def _extended(array: IntArray, more: list[int]) -> IntArray:
    return np.concatenate([array, np.array(more, np.int32)])
