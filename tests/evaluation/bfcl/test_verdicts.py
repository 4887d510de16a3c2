"""Verdicts of bfcl_eval's own checker on generated outputs, recorded by ``scripts/bfcl_verdicts.py``."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from pathlib import Path
from typing import Any

from chorale.evaluation.tasks.bfcl import conversation
from chorale.evaluation.tasks.bfcl.calls import as_python, read_calls
from chorale.evaluation.tasks.bfcl.categories import CATEGORIES, is_multi_turn
from chorale.evaluation.tasks.bfcl.entries import Entry, load_entries
from chorale.evaluation.tasks.bfcl.source import find_files
from chorale.evaluation.tasks.bfcl.task import _check
from chorale.evaluation.tasks.bfcl.values import Kind, check_value
from tests.evaluation.bfcl.scripted import apis_here, reply

RECORD = Path(__file__).with_name("verdicts.json")
FILES = find_files(Path("sample"))
ENTRIES = {entry.id: entry for name in CATEGORIES for entry in load_entries(FILES, name)}


def recorded(multi_turn: bool) -> list[tuple[Entry, Any, bool, str]]:
    cases = [(ENTRIES[name], *rest) for name, *rest in json.loads(RECORD.read_text())]
    return [case for case in cases if is_multi_turn(case[0].category) is multi_turn]


def test_single_turn_verdicts_are_theirs() -> None:
    kinds: Counter[str] = Counter()
    for entry, calls, valid, kind in recorded(multi_turn=False):
        fault = _check(entry, read_calls(reply(calls)))
        assert (fault is None, fault.kind if fault else "") == (valid, kind), (entry.id, calls)
        kinds[kind] += 1
    assert kinds[""] > 35
    assert sum(kinds.values()) > 250
    assert len(kinds) > 12


def test_multi_turn_verdicts_are_theirs() -> None:
    kinds: Counter[str] = Counter()
    with apis_here(FILES) as made:
        for entry, turns, valid, kind in recorded(multi_turn=True):
            read = [[read_calls(reply(step)) for step in turn] for turn in turns]
            python = [[[as_python(call) for call in step] for step in turn if step] for turn in read]
            fault = asyncio.run(conversation.check_turns(made(entry), python, entry.answer))
            assert (fault is None, fault.kind if fault else "") == (valid, kind), (entry.id, turns)
            kinds[kind] += 1
    assert kinds[""] > 15
    assert len(kinds) == 5


def test_an_object_that_may_be_left_out_is_compared_with_the_others() -> None:
    kind, accepted = Kind("dict", dict), ["", {"a": [1]}]
    assert check_value("x", {"a": 1}, accepted, kind) is None
    fault = check_value("x", {"a": 2}, accepted, kind)
    assert fault is not None
    assert fault.kind == "value_error:dict_value"
