"""Random requests with drafts that are made on the device: what they get is what they get without."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pytest

from chorale.engine.core import EngineCore
from chorale.measure.bench.checkpoint_writer import write_random_checkpoint
from chorale.model.config_writer import make_config
from tests.support.device.head_worlds import check_head_world, head_engine
from tests.support.runtime import SIZES

REQUESTS = 12  # of a world
SMALL = SIZES | {"layers": 2, "experts": 4, "hidden": 32, "inter": 32, "heads": 4, "sliding_window": 16}
WRONG = (None, 0.0, 0.2, 0.6)  # None: a random head


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("heads") / "random"
    write_random_checkpoint(folder, make_config(**SMALL), seed=5)
    return folder


DEVICES = (("eagle3", "launched"), ("eagle3", "static"), ("peagle", "static"), ("dflash", "static"))


@pytest.fixture(scope="module", params=DEVICES, ids="-".join)
def devices(request: pytest.FixtureRequest, folder: Path) -> list[EngineCore]:
    """Engines of two block sizes, whose devices the worlds use."""
    kind, how = request.param
    captures = how == "static"
    return [head_engine(folder, captures=captures, block_size=size, kind=kind) for size in (4, 16)]


def check_worlds(devices: list[EngineCore], seeds: Iterable[int]) -> None:
    happened: Counter[str] = Counter()
    for seed in seeds:
        wrong = WRONG[seed % len(WRONG)]
        world = check_head_world(devices[seed // len(WRONG) % 2], seed, REQUESTS, wrong)
        stats = world.core.stats()
        kind = {None: "random", 0.0: "right"}.get(wrong, "some right")
        happened[f"{kind} drafted"] += stats.num_draft_tokens
        happened[f"{kind} accepted"] += stats.num_accepted_tokens
        happened["preemptions"] += world.core.stats().num_preemptions
        happened["hits"] += world.core.stats().prefix_cache_hits
    assert happened["preemptions"]
    assert happened["hits"]
    assert happened["random drafted"] > 50
    assert happened["random accepted"] < happened["random drafted"] / 4
    assert happened["right accepted"] > 0.95 * happened["right drafted"] > 0  # less: answers that end early
    assert 0 < happened["some right accepted"] < happened["some right drafted"]


def test_drafts_on_the_device_change_no_token(devices: list[EngineCore]) -> None:
    """Drafts of every kind; these worlds have hundreds of them, preemptions, and both block sizes."""
    check_worlds(devices, (8, 5, 6, 7))


@pytest.mark.slow
@pytest.mark.parametrize("first", range(100, 600, 50))
def test_drafts_on_the_device_change_no_token_in_many_cases(devices: list[EngineCore], first: int) -> None:
    """10,000 requests, on either path."""
    check_worlds(devices, range(first, first + 50))
