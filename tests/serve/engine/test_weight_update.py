"""Engines that get new weights while they are paused, on a CPU: they answer as if started with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from chorale.config.weight_transfer import WeightTransferConfig
from chorale.engine.commands import Command, Outcome
from chorale.engine.core import EngineCore
from chorale.model.config_writer import make_config
from chorale.model.layouts import Layout
from chorale.testing.checkpoint_writer import write_random_checkpoint
from tests.parallel.test_ranks import WIDE
from tests.support.runtime import Answer, make_engine, random_prompt, request, run


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders "old", and "published", "dense" and "reference": new weights in different layouts."""
    root, config = tmp_path_factory.mktemp("checkpoints"), make_config(**WIDE)
    write_random_checkpoint(root / "old", config, seed=3)
    layouts: tuple[Layout, ...] = ("published", "dense", "reference")
    for layout in layouts:
        write_random_checkpoint(root / layout, config, layout=layout, seed=4)
    return root


def start(root: Path, model: str, **options: Any) -> EngineCore:
    config = WeightTransferConfig(backend="checkpoint", allowed_folders=(str(root),))
    return make_engine(root / model, weight_transfer_config=config, prompt_delay=0.0, **options)


def tell(core: EngineCore, action: Any, **fields: Any) -> Outcome:
    return core.control(Command(action=action, **fields)).result(0)


def answers(core: EngineCore) -> dict[str, list[Answer]]:
    asked = [request("greedy", random_prompt(1, 70), temperature=0, max_tokens=20, logprobs=2)]
    asked.append(request("hot", random_prompt(2, 9), temperature=1.2, seed=4, n=2, max_tokens=20, logprobs=0))
    return run(core, asked)


def update(core: EngineCore, *folders: Path) -> Outcome:
    tell(core, "pause", mode="keep")
    tell(core, "init_weight_transfer_engine")
    tell(core, "start_weight_update")
    for folder in folders:
        tell(core, "update_weights", info={"path": str(folder)})
    tell(core, "prepare_weight_update")
    tell(core, "finish_weight_update")
    return tell(core, "resume")


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("layout", ["published", "dense", "reference"])
def test_updated_weights_give_the_bits_of_an_engine_started_with_them(
    root: Path, size: int, layout: str
) -> None:
    fresh, core = start(root, "published"), start(root, "old", tensor_parallel_size=size)
    try:
        if size == 2:
            fresh.shutdown()
            fresh = start(root, "published", tensor_parallel_size=size)
        wanted = answers(fresh)
        assert answers(core) != wanted
        assert update(core, root / layout).weight_version == "1"
        assert answers(core) == wanted
    finally:
        core.shutdown()
        fresh.shutdown()
