"""Every body and event matches the provider's types: no field is missing, or null where it must not be.

``scenarios`` requests everything that the server can answer; each object is then checked against the
provider's types (``facts``) and the decisions in ``table``.
"""

from __future__ import annotations

import asyncio
import copy
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.wire.facts import Report, facts
from tests.support.wire.recorder import Seen
from tests.support.wire.scenarios import record
from tests.support.wire.table import (
    ABSENT,
    AS_ASKED,
    EXCEPTIONS,
    NULL,
    UNSET,
    find_exception,
    find_unset,
    is_beyond,
    is_end,
)


@pytest.fixture(scope="module")
def seen() -> list[Seen]:
    return asyncio.run(asyncio.wait_for(record(), 300)).seen


@pytest.fixture(scope="module")
def reports(seen: list[Seen]) -> list[Report]:
    """Returns the report of the type check on each object."""
    return [facts(entry.provider).check(entry.value, entry.root) for entry in seen]


def faults(seen: Seen, report: Report) -> Iterator[tuple[str, str, str]]:
    """Yields (provider, field, fault) for faults that the table does not allow."""
    for place, what in report.faults:
        name = ".".join(place)
        if not is_beyond(seen.provider, what) and find_exception(seen.provider, name, what) is None:
            yield seen.provider, name, what
    for place, state in report.states:
        wrong = _wrong_state(seen.provider, place, state)
        if wrong:
            yield seen.provider, ".".join(place), wrong


def _wrong_state(provider: str, place: Any, state: str) -> str | None:
    """Returns the fault of a field without a value, where the type alone does not decide, or None."""
    kind, name = facts(provider).kinds(place), ".".join(place)
    if kind == "nullable" and state == "null" and find_exception(provider, name, "missing"):
        return "null, not absent"
    if state == "present" or kind not in ("either", "unknown"):
        return None
    row = find_unset(provider, name)
    if row is None:
        return f"{state}, and no decision"
    return None if row[0] in (state, AS_ASKED) else f"{state}, not {row[0]}"


def test_every_answer_and_event_has_the_form_of_its_provider(seen: list[Seen], reports: list[Report]) -> None:
    found: Counter[tuple[str, str, str]] = Counter()
    sources: dict[tuple[str, str, str], str] = {}
    for entry, report in zip(seen, reports, strict=True):
        for fault in faults(entry, report):
            found[fault] += 1
            sources.setdefault(fault, entry.source)
    kinds = Counter(f"{entry.provider} {entry.root}" for entry in seen)
    print(f"{len(seen)} objects of {len(kinds)} types checked, {sum(found.values())} violations")
    for kind, number in sorted(kinds.items()):
        print(f"  {number:5} {kind}")
    assert not found, [(number, *fault, sources[fault]) for fault, number in found.most_common()]
    assert len(seen) > 3000


def test_every_type_of_answer_was_asked_for(seen: list[Seen]) -> None:
    asked = {(entry.provider, entry.root) for entry in seen}
    missing = {(name, root) for name in ("openai", "anthropic") for root in facts(name).roots} - asked
    within = {"ChatCompletionStoreMessage", "ResponseItem", "ErrorObject"}  # only within other objects
    assert missing == {("openai", root) for root in within}


def test_no_row_of_the_table_is_stale(seen: list[Seen], reports: list[Report]) -> None:
    used, decided = set(), set()
    for entry, report in zip(seen, reports, strict=True):
        used |= {find_exception(entry.provider, ".".join(place), what) for place, what in report.faults}
        for place, _ in report.states:
            name = ".".join(place)
            decided |= {key for key in UNSET if key[0] == entry.provider and is_end(name, key[1])}
    assert EXCEPTIONS.keys() - used == set()
    assert UNSET.keys() - decided == set()
    assert {state for state, _ in UNSET.values()} == {NULL, ABSENT, AS_ASKED}


# Kinds of faults that the table allows nowhere, so that no row of it shows that they are found.
PLANTED = (
    ("Message", "citations", {"null, not absent"}),  # valid by its type: only the table forbids the null
    ("Response", "encrypted_content", {"null, not absent", "null"}),
)


@pytest.mark.parametrize(("root", "name", "expected"), PLANTED)
def test_a_planted_null_is_found(seen: list[Seen], root: str, name: str, expected: set[str]) -> None:
    entry = next(entry for entry in seen if entry.root == root and entry.provider != "open_responses")
    broken = copy.deepcopy(entry.value)
    broken["content" if root == "Message" else "output"][0][name] = None
    planted = Seen(broken, entry.provider, root, "planted")
    found = {what for _, _, what in faults(planted, facts(entry.provider).check(broken, root))}
    assert "null, not absent" in found <= expected
