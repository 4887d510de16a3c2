"""What measures whole models (``full_size.py``), on a small one and a CPU: it is exact, and sees faults."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gpu.full_size import Scored, check, engine, forced, parts, random_texts, score
from tests.runtime.steps.test_decode_graphs import graph_engine
from tests.support.runtime import VOCAB, write_checkpoint

TEXTS = random_texts((1, 2, 17, 31, 33, 200), 6, VOCAB)
SETTINGS = {"device": "cpu", "kv_cache_memory_bytes": 2**24, "num_threads": 1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("model") / "random")


@pytest.fixture(scope="module")
def exact(folder: Path) -> list[Scored]:
    with engine(folder, TEXTS, **SETTINGS) as core:
        return score(core, TEXTS, whole=True)


@pytest.fixture(scope="module")
def yardstick(folder: Path) -> list[Scored]:
    with engine(folder, TEXTS, dtype="bfloat16", **SETTINGS) as core:
        return score(core, TEXTS, whole=True)


def test_decoded_equals_prompt(folder: Path, exact: list[Scored]) -> None:
    for budget in (2048, 7):
        with engine(folder, TEXTS, max_num_batched_tokens=budget, **SETTINGS) as core:
            assert parts(score(core, TEXTS), exact)["all"].worst < 1e-4
            found = score(core, TEXTS, copies=3, prompts=False)
    assert parts(found, exact)["decoded"].worst < 1e-4
    assert parts(found, exact)["decoded"].positions == 3 * 6 * 6


def test_static_decode_steps_are_measured(folder: Path, exact: list[Scored]) -> None:
    core = graph_engine(folder)
    with forced(core, TEXTS):
        assert parts(score(core, TEXTS), exact)["all"].worst < 1e-4


def test_bfloat16_is_its_own_yardstick(folder: Path, exact: list[Scored], yardstick: list[Scored]) -> None:
    with engine(folder, TEXTS, dtype="bfloat16", **SETTINGS) as core:
        check(score(core, TEXTS), exact, yardstick)


@pytest.mark.parametrize("fault", ["sinks", "rope"])
def test_faults_are_seen(folder: Path, exact: list[Scored], yardstick: list[Scored], fault: str) -> None:
    with engine(folder, TEXTS, **SETTINGS) as core:
        model = core._executor._worker._model
        if fault == "sinks":
            model.weights.layers[1].sinks.add_(1.0)
        else:
            model.rope[:] = model.rope.roll(1, 0)
        with pytest.raises(AssertionError):
            check(score(core, TEXTS), exact, yardstick)


def test_a_fault_of_one_short_text_is_seen(exact: list[Scored], yardstick: list[Scored]) -> None:
    found = [Scored(text.prompt.copy(), text.decoded.copy()) for text in exact]
    found[0].decoded[:] += 0.5
    with pytest.raises(AssertionError):
        check(found, exact, yardstick)
