"""The leaderboard's categories, and how it combines their scores.

The categories of v4 that need a search engine or a memory back end (the "agentic" ones) are left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from chorale.evaluation.task import Breakdown

SIMPLE = ("simple_python", "simple_java", "simple_javascript")
LIVE_CALLS = ("live_simple", "live_multiple", "live_parallel", "live_parallel_multiple")
RELEVANCE = ("irrelevance", "live_irrelevance", "live_relevance")  # have no expected calls
GROUPS: dict[str, tuple[str, ...]] = {
    "non_live": (*SIMPLE, "multiple", "parallel", "parallel_multiple", "irrelevance"),
    "live": (*LIVE_CALLS, "live_irrelevance", "live_relevance"),
    "multi_turn": (
        "multi_turn_base",
        "multi_turn_miss_func",
        "multi_turn_miss_param",
        "multi_turn_long_context",
    ),
}
CATEGORIES = tuple(category for group in GROUPS.values() for category in group)
_LANGUAGES = {"simple_java": "java", "simple_javascript": "javascript"}


def language(category: str) -> str:
    return _LANGUAGES.get(category, "python")


def is_multi_turn(category: str) -> bool:
    return category in GROUPS["multi_turn"]


def combined(scores: Mapping[str, Breakdown]) -> list[Breakdown]:
    """Returns the leaderboard's combined scores whose categories are all present.

    Non-live and multi-turn scores are plain means, the live score is weighted by the number of samples. Of
    the overall score's weights (10 non-live, 10 live, 10 irrelevance, 30 multi-turn, 40 agentic), the last
    is left out, and the sum divided by 60: that overall score is not the leaderboard's.
    """
    known = dict(scores)
    rows = [
        _mean("simple", SIMPLE, known),
        _mean("non_live", ("simple", "multiple", "parallel", "parallel_multiple"), known),
        _weighted("live", LIVE_CALLS, known),
        _mean("irrelevance_all", ("irrelevance", "live_irrelevance"), known),
        _mean("multi_turn", GROUPS["multi_turn"], known),
    ]
    parts = [known.get(name) for name in ("non_live", "live", "irrelevance_all", "multi_turn")]
    if all(parts):
        weights = (10, 10, 10, 30)
        total = sum(weight * part.score for weight, part in zip(weights, parts, strict=True) if part)
        count = sum(row.count for name, row in scores.items() if name in CATEGORIES)
        rows.append(Breakdown("overall_without_agentic", total / sum(weights), count))
    return [row for row in rows if row is not None]


def _present(names: Sequence[str], known: Mapping[str, Breakdown]) -> list[Breakdown]:
    found = [known[name] for name in names if name in known]
    return found if len(found) == len(names) else []


def _mean(name: str, names: Sequence[str], known: dict[str, Breakdown]) -> Breakdown | None:
    """Adds the mean of the named scores to ``known`` and returns it; None if one of them is missing."""
    parts = _present(names, known)
    if not parts:
        return None
    known[name] = Breakdown(name, sum(part.score for part in parts) / len(parts), sum(p.count for p in parts))
    return known[name]


def _weighted(name: str, names: Sequence[str], known: dict[str, Breakdown]) -> Breakdown | None:
    parts = _present(names, known)
    if not parts:
        return None
    count = sum(part.count for part in parts)
    known[name] = Breakdown(name, sum(part.score * part.count for part in parts) / count, count)
    return known[name]
