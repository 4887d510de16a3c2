"""make_planner: the planner of the engine's drafter."""

from __future__ import annotations

from collections.abc import Callable

from chorale.engine.drafts.head import HeadDrafter
from chorale.engine.drafts.head_planner import HeadDraftPlanner
from chorale.engine.drafts.planner import DraftPlanner
from chorale.engine.engine_state import EngineState
from chorale.engine.sequence import Sequence


def make_planner(
    engine: EngineState, grow: Callable[[Sequence, int], None]
) -> DraftPlanner | HeadDraftPlanner | None:
    """``grow``: gives a sequence blocks for so many tokens and puts them into the plan."""
    drafter = engine.drafter
    if drafter is None:
        return None
    if isinstance(drafter, HeadDrafter):
        return HeadDraftPlanner(engine, drafter, grow)
    return DraftPlanner(engine, drafter, grow)
