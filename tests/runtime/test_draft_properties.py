"""Random requests with drafts of every kind: what they get is what they get without.

Logits differ in their last bits between a draft and single tokens (matrix products of other shapes), which
can turn the choice between two nearly equal tokens. The seeds here are fixed, and no such tie occurs.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from chorale.engine.core import EngineCore
from chorale.grammar import constraint
from chorale.grammar.frames import raw_grammar
from chorale.measure.bench.checkpoint_writer import write_random_checkpoint
from chorale.model.config_writer import make_config
from tests.support.device.draft_worlds import KINDS, Tally, check_world
from tests.support.grammar import structured
from tests.support.runtime import SIZES, make_engine

SMALL = SIZES | {"layers": 2, "experts": 4, "hidden": 32, "inter": 32, "heads": 4, "sliding_window": 16}
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
def devices(tmp_path_factory: pytest.TempPathFactory) -> list[EngineCore]:
    """Engines of two block sizes, whose devices the worlds use."""
    folder = tmp_path_factory.mktemp("drafts") / "random"
    write_random_checkpoint(folder, make_config(**SMALL), seed=5)
    return [make_engine(folder, max_model_len=128, block_size=size) for size in (4, 16)]


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> list[EngineCore]:
    """One with the vocabulary that grammars need."""
    folder = structured.write_checkpoint(tmp_path_factory.mktemp("wide") / "random")
    return [make_engine(folder, max_model_len=128, block_size=4)]


def check_worlds(
    devices: list[EngineCore], seeds: range, num_requests: int, grammars: Sequence[str] = ()
) -> Tally:
    tally = Tally()
    for seed in seeds:
        kind = KINDS[seed % len(KINDS)]
        device = devices[seed // len(KINDS) % len(devices)]
        tally.add(kind, check_world(device, seed, kind, num_requests, grammars))
    return tally


def test_drafts_change_no_token(devices: list[EngineCore]) -> None:
    """Drafts of every kind with either block size."""
    check_worlds(devices, range(10), 20).check()


def test_drafts_change_no_token_under_grammars(wide: list[EngineCore]) -> None:
    tally = check_worlds(wide, range(5), 8, GRAMMARS)
    assert tally.accepted["right"] == tally.drafted["right"] > 20
    assert sum(tally.drafted.values()) > sum(tally.accepted.values())
    assert tally.happened["preemptions"]


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 1000, 50))
def test_drafts_change_no_token_in_many_cases(devices: list[EngineCore], first: int) -> None:
    """20,000 requests in total."""
    check_worlds(devices, range(first, first + 50), 20).check()


@pytest.mark.slow
def test_drafts_change_no_token_under_grammars_in_many_cases(wide: list[EngineCore]) -> None:
    """960 requests."""
    check_worlds(wide, range(10, 130), 8, GRAMMARS)
