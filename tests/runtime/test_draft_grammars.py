"""Random requests with grammars and drafts of every kind, in the vocabulary that grammars need."""

from __future__ import annotations

import pytest

from chorale.engine.core import EngineCore
from chorale.grammar import constraint
from chorale.grammar.frames import raw_grammar
from tests.support.device.draft_worlds import KINDS, Tally, check_world
from tests.support.grammar.structured import write_checkpoint
from tests.support.runtime import make_engine

REQUESTS, WORLDS = 8, 10  # of a world; of a test
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"enum": ["left", "right"]}},
    "required": ["a", "b"],
}
GRAMMARS = [
    raw_grammar(each)
    for each in (
        constraint.regex("[0-9]{3}-[a-z]{2,9}", "p"),
        constraint.regex("(ab|ba)*c", "p"),
        constraint.regex("yes|no", "p"),
        constraint.json_schema(SCHEMA, "p"),
    )
]


@pytest.fixture(scope="module")
def device(tmp_path_factory: pytest.TempPathFactory) -> EngineCore:
    return make_engine(
        write_checkpoint(tmp_path_factory.mktemp("wide") / "random"), max_model_len=128, block_size=4
    )


def check_worlds(device: EngineCore, first: int) -> Tally:
    tally = Tally()
    for seed in range(first, first + WORLDS):
        kind = KINDS[seed % len(KINDS)]
        tally.add(kind, check_world(device, seed, kind, REQUESTS, GRAMMARS))
    return tally


def test_drafts_change_nothing(device: EngineCore) -> None:
    """80 requests."""
    tally = check_worlds(device, 0)
    assert tally.accepted["right"] == tally.drafted["right"] > 20
    assert sum(tally.drafted.values()) > sum(tally.accepted.values())


@pytest.mark.slow
def test_drafts_change_nothing_in_many_more(device: EngineCore) -> None:
    """960 requests."""
    for first in range(WORLDS, 13 * WORLDS, WORLDS):
        check_worlds(device, first)
