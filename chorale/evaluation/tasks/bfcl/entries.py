"""The leaderboard's test cases, as its own loader prepares them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from chorale.errors import ConfigError
from chorale.evaluation.task import Message
from chorale.evaluation.tasks.bfcl.categories import RELEVANCE, is_multi_turn, language
from chorale.evaluation.tasks.bfcl.schema import with_hints
from chorale.evaluation.tasks.bfcl.source import BfclFiles

NO_CALL, A_CALL = "no call", "a call"


@dataclass(frozen=True, slots=True)
class Entry:
    """A test case. ``functions`` are as published, ``shown`` have the hints that the model reads.

    Multi-turn cases also have ``classes`` with their ``initial`` states, and ``added``: functions that are
    withheld until the turn of that number.
    """

    id: str
    category: str
    turns: list[list[Message]]
    functions: list[dict[str, Any]]
    shown: list[dict[str, Any]]
    answer: Any
    classes: tuple[str, ...] = ()
    initial: dict[str, Any] = field(default_factory=dict)
    added: Mapping[int, list[dict[str, Any]]] = field(default_factory=dict)

    @property
    def language(self) -> str:
        return language(self.category)

    @property
    def long_context(self) -> bool:
        return "long_context" in self.category


def load_entries(files: BfclFiles, category: str) -> list[Entry]:
    rows = files.questions(category)
    answers = _answers(files, category, len(rows))
    try:
        return [_entry(files, category, row, answer) for row, answer in zip(rows, answers, strict=True)]
    except (KeyError, TypeError, AttributeError) as fault:
        raise ConfigError(f"{category}: a test case lacks {fault} or has another form than BFCL v4") from None


def _answers(files: BfclFiles, category: str, count: int) -> list[Any]:
    if category in RELEVANCE:
        return [NO_CALL if "irrelevance" in category else A_CALL] * count
    answers = [row["ground_truth"] for row in files.answers(category)]
    if len(answers) != count:  # their ids differ in places; the order is the same
        raise ConfigError(f"{category} has {count} questions and {len(answers)} answers")
    return answers


def _entry(files: BfclFiles, category: str, row: dict[str, Any], answer: Any) -> Entry:
    if not is_multi_turn(category):
        functions = row.get("function", [])
        shown = with_hints(functions, language(category))
        return Entry(row["id"], category, row["question"], functions, shown, answer)
    classes = tuple(row["involved_classes"])
    functions = [function for name in classes for function in files.functions(name)]
    added = {
        int(turn): [_take(functions, name) for name in names]
        for turn, names in row.get("missed_function", {}).items()
    }
    shown = with_hints(functions, "python")
    initial = row.get("initial_config", {})
    return Entry(row["id"], category, row["question"], functions, shown, answer, classes, initial, added)


def _take(functions: list[dict[str, Any]], name: str) -> dict[str, Any]:
    """Removes a function from the list and returns it."""
    place = next(place for place, function in enumerate(functions) if function["name"] == name)
    return functions.pop(place)
