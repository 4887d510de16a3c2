"""Drafts on a GPU, captured and launched: the tokens are those without. ``pytest -m gpu``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from chorale.config.speculative import SpeculativeConfig
from chorale.engine.core import EngineCore
from tests.support.device.draft_worlds import check_equal
from tests.support.device.head_worlds import known_drafts
from tests.support.engine.drafters import knowing
from tests.support.runtime import (
    VOCAB,
    make_engine,
    mixed_requests,
    random_prompt,
    request,
    run,
    tokens_of,
    with_drafter,
)

pytestmark = pytest.mark.gpu
SETTINGS: dict[str, Any] = {"device": "cuda", "dtype": "float32", "ops": "triton", "max_model_len": 700}
HEAD = SpeculativeConfig(method="synthetic", num_speculative_tokens=3)  # a random head


def head_core(folder: Path, **options: Any) -> EngineCore:
    return make_engine(folder, **SETTINGS, speculative_config=HEAD, **options)


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> dict[str, list[Any]]:
    return run(make_engine(checkpoint, **SETTINGS), requests())


def requests() -> list[Any]:
    more = [
        request(f"long {number}", random_prompt(100 + number, seed=number), seed=number, max_tokens=80)
        for number in range(5)
    ]
    numbered = enumerate(mixed_requests() + more)
    return [
        msgspec.structs.replace(each, sampling=msgspec.structs.replace(each.sampling, seed=number))
        for number, each in numbered
    ]


@pytest.mark.parametrize("options", [{}, {"enforce_eager": True}, {"max_num_batched_tokens": 64}])
def test_a_random_head_changes_nothing(
    checkpoint: Path,
    expected: dict[str, list[Any]],
    options: dict[str, Any],
) -> None:
    core = head_core(checkpoint, **options)
    check_equal(run(core, requests()), expected)
    stats = core.stats()
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens


@pytest.mark.parametrize("wrong", [0.0, 0.3])
def test_a_head_that_often_knows_changes_nothing(
    checkpoint: Path,
    expected: dict[str, list[Any]],
    wrong: float,
) -> None:
    """Launched, because the answers are put in between."""
    core = head_core(checkpoint, enforce_eager=True)
    with known_drafts(core, expected, requests(), wrong):
        check_equal(run(core, requests()), expected)
    stats = core.stats()
    assert stats.num_accepted_tokens > (1 - wrong) ** 3 * 0.9 * stats.num_draft_tokens


def test_drafts_of_the_host_are_captured(
    checkpoint: Path,
    expected: dict[str, list[Any]],
) -> None:
    core = make_engine(
        checkpoint, **SETTINGS, speculative_config=SpeculativeConfig(method="ngram", num_speculative_tokens=3)
    )
    oracle = knowing(expected, most=3, varies=True, wrong=0.1, vocab_size=VOCAB)
    check_equal(run(with_drafter(core, oracle), requests()), expected)


def test_bfloat16_draws_the_same_tokens(checkpoint: Path) -> None:
    """Rounding may turn a choice between nearly equal tokens, after which an answer is another one."""
    options = SETTINGS | {"dtype": "bfloat16"}
    plain = tokens_of(run(make_engine(checkpoint, **options), requests()))
    core = make_engine(checkpoint, **options, speculative_config=HEAD)
    found = tokens_of(run(core, requests()))
    equal = sum(found[name] == plain[name] for name in plain)
    assert equal >= 0.5 * len(plain), f"{equal} of {len(plain)}"
