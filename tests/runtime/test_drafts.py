"""The engine on a random checkpoint with drafts: every token is the one that it samples without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from chorale.engine.types import GenerateRequest
from tests.runtime.test_engine_properties import SAMPLINGS, mixed_requests
from tests.support.device.draft_worlds import Answers, check_equal
from tests.support.engine.drafters import Nonsense, knowing
from tests.support.runtime import VOCAB, make_engine, random_prompt, request, run


def requests() -> list[GenerateRequest]:
    extra = [
        request("logprobs", random_prompt(40, seed=50), seed=9, max_tokens=20, logprobs=3),
        request("choices", random_prompt(20, seed=51), seed=10, max_tokens=20, n=3, logprobs=0),
        request(
            "stops", random_prompt(5, seed=52), seed=11, max_tokens=60, stop_token_ids=tuple(range(0, 512, 9))
        ),
    ]
    return mixed_requests() + extra


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> Answers:
    return run(make_engine(checkpoint, enable_prefix_caching=False), requests())


DRAFTS: list[dict[str, Any]] = [
    {"most": 4},
    {"most": 3, "wrong": 1.0},
    {"most": 7, "varies": True, "wrong": 0.3},
    {"most": 30, "varies": True, "wrong": 0.03},
]
OPTIONS: list[dict[str, Any]] = [
    {},
    {"async_scheduling": True, "max_num_seqs": 3},
    {"max_num_batched_tokens": 20, "num_gpu_blocks_override": 32, "max_model_len": 256},
]


@pytest.mark.parametrize("options", OPTIONS, ids=["plain", "overlap, few rows", "small chunks, few blocks"])
@pytest.mark.parametrize("drafts", DRAFTS, ids=["right", "wrong", "some right", "long"])
def test_drafts_change_nothing(
    checkpoint: Path, expected: Answers, drafts: dict[str, Any], options: dict[str, Any]
) -> None:
    core = make_engine(checkpoint, knowing(expected, vocab_size=VOCAB, **drafts), **options)
    check_equal(run(core, requests()), expected)
    committer = core._scheduler.committer
    assert committer.num_draft_tokens > 50
    rate = committer.num_accepted_tokens / committer.num_draft_tokens
    wrong = drafts.get("wrong", 0.0)
    assert rate == 1 - wrong if wrong in (0.0, 1.0) else 0.1 < rate < 1.0


def test_nonsense_changes_nothing(checkpoint: Path, expected: Answers) -> None:
    check_equal(run(make_engine(checkpoint, Nonsense(VOCAB, 3)), requests()), expected)


def test_samplings_are_those_of_the_engines_tests() -> None:
    """Penalties, bad words, biases, allowed ids and min_tokens are among them."""
    names = {name for sampling in SAMPLINGS for name in sampling}
    assert {
        "repetition_penalty",
        "frequency_penalty",
        "bad_words",
        "allowed_token_ids",
        "min_tokens",
    } <= names
