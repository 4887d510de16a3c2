"""Random requests with drafts of every kind: what they get is what they get without.

Logits differ in their last bits between a draft and single tokens (matrix products of other shapes), which
can turn the choice between two nearly equal tokens. The seeds here are fixed, and no such tie occurs.
"""

from __future__ import annotations

import pytest

from chorale.engine.core import EngineCore
from chorale.model.config_writer import make_config
from chorale.testing.checkpoint_writer import write_random_checkpoint
from tests.support.device.draft_worlds import KINDS, Tally, check_world
from tests.support.runtime import SIZES, make_engine

REQUESTS, WORLDS = 20, 50  # of a world; of a test
SMALL = SIZES | {"layers": 2, "experts": 4, "hidden": 32, "inter": 32, "heads": 4, "sliding_window": 16}


@pytest.fixture(scope="module")
def devices(tmp_path_factory: pytest.TempPathFactory) -> list[EngineCore]:
    """Engines of two block sizes, whose devices the worlds use."""
    folder = tmp_path_factory.mktemp("drafts") / "random"
    write_random_checkpoint(folder, make_config(**SMALL), seed=5)
    return [make_engine(folder, max_model_len=128, block_size=size) for size in (4, 16)]


def check_worlds(devices: list[EngineCore], first: int, count: int = WORLDS) -> None:
    tally = Tally()
    for seed in range(first, first + count):
        kind = KINDS[seed % len(KINDS)]
        tally.add(kind, check_world(devices[seed // len(KINDS) % 2], seed, kind, REQUESTS))
    tally.check()


def test_drafts_change_nothing(devices: list[EngineCore]) -> None:
    """200 requests: drafts of every kind with either block size."""
    check_worlds(devices, 0, 20)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 1000, WORLDS))
def test_drafts_change_nothing_in_many_more(devices: list[EngineCore], first: int) -> None:
    """20,000 in total."""
    check_worlds(devices, first)
