"""PlannedDrafts: the drafts of one step."""

from __future__ import annotations

from dataclasses import dataclass, field

from chorale.engine.types import IntArray


@dataclass(frozen=True, slots=True)
class PlannedDrafts:
    """``tokens``: by row, best key first."""

    tokens: dict[int, IntArray] = field(default_factory=dict)
    waiting: list[int] = field(default_factory=list)  # decoding rows that this step leaves out
    num_made: int = -1  # as in ``StepPlan``
    making: frozenset[int] = frozenset()  # rows that get new drafts


NO_DRAFTS = PlannedDrafts()
