"""The task: reads the test cases, asks with native function calls, grades, and combines the scores."""

from __future__ import annotations

import ast
import asyncio
import importlib.util
import sys
from collections.abc import Sequence
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from types import MappingProxyType

from chorale.errors import ConfigError
from chorale.evaluation.data import digest
from chorale.evaluation.task import BaseTask, Breakdown, Outcome, Sample, Scored, Session, take
from chorale.evaluation.tasks.bfcl import conversation
from chorale.evaluation.tasks.bfcl.ast_checker import check_calls
from chorale.evaluation.tasks.bfcl.calls import as_python, read_calls
from chorale.evaluation.tasks.bfcl.categories import CATEGORIES, GROUPS, RELEVANCE, combined, is_multi_turn
from chorale.evaluation.tasks.bfcl.entries import A_CALL, Entry, load_entries
from chorale.evaluation.tasks.bfcl.fault import Fault
from chorale.evaluation.tasks.bfcl.schema import to_tools
from chorale.evaluation.tasks.bfcl.source import BfclFiles, find_files

_NOTES = (
    "Function calls of the API, as in the leaderboard's FC mode. Differences: no agentic categories; the "
    "schema of a result is not sent with its function; calls whose arguments are not JSON get an answer "
    "before the next turn."
)
_MAX_PROCESSES = 128  # API processes at once, of about 20 MB each


class Bfcl(BaseTask):
    """A run of some categories. Each multi-turn sample has a process for its API classes."""

    version = "1"
    metric = "accuracy over samples"
    notes = _NOTES
    defaults = MappingProxyType({"temperature": 0.001})

    def __init__(
        self, name: str, categories: Sequence[str], data: Path | None, limit: int | None, seed: int
    ) -> None:
        self.name = name
        self._categories = categories
        self._limit, self._seed = limit, seed
        self._data = data
        self._processes = asyncio.Semaphore(_MAX_PROCESSES)

    @cached_property
    def _files(self) -> BfclFiles:
        return find_files(self._data)

    @cached_property
    def _entries(self) -> dict[str, Entry]:
        """Returns the test cases by id. A folder may have a part of the categories."""
        found = [category for category in self._categories if self._files.has(category)]
        if not found:
            raise ConfigError(f"{self._files.data} has none of the categories {', '.join(self._categories)}")
        return {entry.id: entry for category in found for entry in load_entries(self._files, category)}

    @property
    def data_revision(self) -> str:  # type: ignore[override]
        """The version of the wheel, or a hash of the test cases in a folder."""
        return self._files.revision or digest([asdict(entry) for entry in self._entries.values()])

    def samples(self) -> Sequence[Sample]:
        samples = [
            Sample(entry.id, entry.turns, entry.answer, entry.category) for entry in self._entries.values()
        ]
        return take(samples, self._limit, self._seed)

    async def prepare(self) -> None:
        """Checks that the API classes' imports are installed."""
        names = {name for entry in self._entries.values() for name in entry.classes}
        for name in sorted(names):
            for module in _imports(self._files.source(name)):
                if importlib.util.find_spec(module) is None:
                    raise ConfigError(
                        f"{name} of {self._files.classes} needs a package: pip install {module}"
                    )

    async def run(self, sample: Sample, repeat: int, session: Session) -> Outcome:
        entry = self._entries[sample.id]
        if is_multi_turn(entry.category):
            async with self._processes:
                return await conversation.run(self._files, entry, session)
        reply = await session.ask(entry.turns[0], tools=to_tools(entry.shown) or None)
        calls = read_calls(reply)
        fault = _check(entry, calls)
        detail = {"reason": "right" if fault is None else fault.message}
        if fault is not None:
            detail |= {"kind": fault.kind, **fault.detail}
        answer = None if calls is None else "\n".join(as_python(call) for call in calls)
        return Outcome(float(fault is None), answer, detail)

    def breakdowns(self, scored: Sequence[Scored]) -> list[Breakdown]:
        """Returns the score of each category, in the leaderboard's order, and its combined scores."""
        groups: dict[str, list[float]] = {}
        for one in scored:
            groups.setdefault(one.sample.group, []).append(one.outcome.score)
        rows = {
            name: Breakdown(name, sum(groups[name]) / len(groups[name]), len(groups[name]))
            for name in CATEGORIES
            if name in groups
        }
        return [*rows.values(), *combined(rows)]


def _check(entry: Entry, calls: list[dict[str, object]] | None) -> Fault | None:
    if entry.category in RELEVANCE:
        wanted = entry.answer == A_CALL
        if (calls is not None) is wanted:
            return None
        kind = "relevance_error:decoder_failed" if wanted else "irrelevance_error:decoder_success"
        return Fault(kind, "No function is called." if wanted else "A function is called, but none is fit.")
    if calls is None:
        return Fault("ast_decoder:decoder_failed", "The answer has no call, or one with invalid arguments.")
    return check_calls(entry.functions, calls, entry.answer, entry.language, entry.category)


def _imports(source: str) -> list[str]:
    """Returns the packages outside of the standard library that a module imports."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.partition(".")[0])
    return sorted(found - set(sys.stdlib_module_names) - {"bfcl_eval"})


def bfcl(*, data: Path | None = None, limit: int | None = None, seed: int = 0) -> Bfcl:
    """All categories that need no outside service."""
    return Bfcl("bfcl", CATEGORIES, data, limit, seed)


def non_live(*, data: Path | None = None, limit: int | None = None, seed: int = 0) -> Bfcl:
    return Bfcl("bfcl_non_live", GROUPS["non_live"], data, limit, seed)


def live(*, data: Path | None = None, limit: int | None = None, seed: int = 0) -> Bfcl:
    return Bfcl("bfcl_live", GROUPS["live"], data, limit, seed)


def multi_turn(*, data: Path | None = None, limit: int | None = None, seed: int = 0) -> Bfcl:
    return Bfcl("bfcl_multi_turn", GROUPS["multi_turn"], data, limit, seed)
