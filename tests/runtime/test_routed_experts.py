"""Routed experts of engines that compute the same requests in many ways, against transformers' routers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from chorale.engine.core import EngineCore
from chorale.engine.drafts.head import HeadDrafter
from chorale.engine.types import ExpertIds
from tests.model.test_parity import transformers_model
from tests.runtime.steps.test_decode_graphs import decodes_of, graph_engine, mixed_of, worker_of
from tests.support.device.head_worlds import MOST_DRAFTS, drafting_of, head_engine, known_drafts
from tests.support.engine.drafters import Nonsense, knowing
from tests.support.runtime import (
    VOCAB,
    Answer,
    make_engine,
    random_prompt,
    request,
    run,
    small_config,
    tokens_of,
    with_drafter,
)  # fmt: skip

Check = Callable[[EngineCore], dict[str, list[Answer]]]
STEM = random_prompt(40, seed=9)
PROMPTS = [STEM[:33], STEM + random_prompt(9, seed=1), STEM, random_prompt(20, seed=2)]
REQUESTS = [
    request(f"r{i}", prompt, seed=i, max_tokens=30, n=1 + (i == 2), routed_experts_start=7 * (i == 3))
    for i, prompt in enumerate(PROMPTS)
]
ON: dict[str, Any] = {"enable_return_routed_experts": True}


@pytest.fixture(scope="module")
def check() -> Check:
    """Runs the requests. Each choice must get the experts that transformers' routers choose for its tokens,
    except for the last one."""
    model, known = transformers_model(small_config()), dict[tuple[int, ...], ExpertIds]()

    @torch.inference_mode()
    def expected(tokens: tuple[int, ...]) -> ExpertIds:
        if tokens not in known:
            logits = model(torch.tensor([tokens[:-1]]), output_router_logits=True).router_logits
            layers = [each.view(len(tokens) - 1, -1).topk(4).indices for each in logits]
            known[tokens] = torch.stack(layers, 1).to(torch.uint8).numpy()
        return known[tokens]

    def checked(core: EngineCore) -> dict[str, list[Answer]]:
        answers = run(core, REQUESTS)
        for each in REQUESTS:
            for answer in answers[each.request_id]:
                found = np.frombuffer(answer.routed_experts, np.uint8).reshape(-1, 4, 4)
                wanted = expected((*each.prompt_token_ids, *answer.token_ids))
                np.testing.assert_array_equal(found, wanted[each.sampling.routed_experts_start :])
        return answers

    return checked


@pytest.mark.parametrize(
    "options",
    [
        {"ops": "reference"},
        {"async_scheduling": True, "max_num_batched_tokens": 16, "block_size": 4},
        {"tensor_parallel_size": 2, "enable_expert_parallel": True, "max_num_batched_tokens": 16},
    ],
)
def test_they_are_those_of_the_router_also_for_a_cached_prefix(
    checkpoint: Path, check: Check, options: dict[str, Any]
) -> None:
    core = make_engine(checkpoint, **ON, **options)
    try:
        check(core)
        assert all(answers[0].num_cached_tokens >= 16 for answers in check(core).values())
    finally:
        core.shutdown()


@pytest.mark.parametrize("overlap", [False, True])
def test_a_preempted_sequence_returns_each_position_once(
    checkpoint: Path, check: Check, overlap: bool
) -> None:
    options = {"num_gpu_blocks_override": 20, "max_model_len": 96, "max_num_batched_tokens": 7}
    core = make_engine(checkpoint, **ON, **options, async_scheduling=overlap)
    check(core)
    assert core.stats().num_preemptions > 0


@pytest.mark.parametrize("overlap", [False, True])
def test_rejected_drafts_leave_nothing(checkpoint: Path, check: Check, overlap: bool) -> None:
    core = make_engine(checkpoint, **ON, async_scheduling=overlap)
    known = check(core)
    for drafter in (knowing(known, vocab_size=VOCAB, most=5, wrong=0.3), Nonsense(VOCAB, 3)):
        drafting = with_drafter(core, drafter)
        assert tokens_of(check(drafting)) == tokens_of(known)
        assert drafting.stats().num_accepted_tokens < drafting.stats().num_draft_tokens


def test_captured_decode_and_mixed_steps(checkpoint: Path, check: Check) -> None:
    core = graph_engine(checkpoint, **ON, num_threads=1)
    check(core)
    assert min(decodes_of(core).num_graphs, mixed_of(core).num_graphs) > 0


def test_captured_steps_with_drafts_of_the_device(checkpoint: Path, check: Check) -> None:
    """Rows are padded to the same number of tokens, and positions are known to the device only."""
    core = head_engine(checkpoint, captures=True, **ON)
    drafting = with_drafter(core, HeadDrafter(MOST_DRAFTS, 64))
    with known_drafts(core, check(with_drafter(core, None)), REQUESTS, 0.3):
        check(drafting)
    graphs, stats = drafting_of(core).graphs, drafting.stats()
    assert graphs is not None
    assert graphs.num_graphs > 0
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens


def test_without_the_flag_nothing_is_kept(checkpoint: Path) -> None:
    core = make_engine(checkpoint)
    assert all(answer.routed_experts == b"" for some in run(core, REQUESTS).values() for answer in some)
    assert (worker_of(core)._model.routed, core._engine.experts) == (None, None)
