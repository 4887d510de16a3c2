"""Drafts change no answer: the demo's chats and completions, with stop strings, choices and formats."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from chorale.config.engine import EngineConfig
from chorale.config.speculative import SpeculativeConfig
from chorale.engine.core import EngineCore
from chorale.engine.drafts.lookup import SuffixDrafter
from chorale.engine.scheduling.scheduler import PlanningDrafter
from chorale.serve.engine.build import build_engine
from tests.support.local_client import LocalClient
from tests.support.runtime import with_drafter
from tests.support.server import Server, served, with_server

ENGINE: dict[str, Any] = {"max_model_len": 1024, "max_num_seqs": 8, "num_threads": 1}
CHATS: list[dict[str, Any]] = [
    {"content": "What is the capital of France?", "temperature": 0},
    {"content": "Count from one to ten.", "temperature": 1, "seed": 3, "n": 2, "logprobs": True},
    {"content": "Tell me a story.", "temperature": 0.7, "seed": 4, "max_tokens": 60},
    {"content": "Name a colour.", "seed": 5, "frequency_penalty": 0.5, "presence_penalty": 0.2},
    {"content": "Say hello.", "seed": 6, "stop": ["e", "o"]},
]
COMPLETIONS: list[dict[str, Any]] = [
    {"prompt": "The sun", "temperature": 0, "max_tokens": 40},
    {"prompt": "The sun", "temperature": 0, "max_tokens": 40, "stop": [" the", "a "]},
    {"prompt": "One two three", "seed": 7, "max_tokens": 40, "n": 2, "logprobs": 2},
    {"prompt": "One two three", "seed": 7, "max_tokens": 40, "n": 2, "stop": ["e"], "logprobs": 0},
]


def answers(
    rounds: int, drafter: PlanningDrafter | None = None, **options: Any
) -> tuple[list[list[Any]], EngineCore]:
    """Returns the answers of each round, in which all requests are sent concurrently, and the engine."""

    async def ask(server: Server) -> list[list[Any]]:
        found = []
        for _ in range(rounds):
            asked = [server.chat(**fields) for fields in CHATS]
            asked += [server.complete(**fields) for fields in COMPLETIONS]
            responses = await asyncio.gather(*asked)
            assert all(response.status_code == 200 for response in responses)
            found.append([said(response.json()) for response in responses])
        return found

    core, info = build_engine(EngineConfig(model="demo", **ENGINE, **options))
    if drafter is not None:
        core = with_drafter(core, drafter)
    client = LocalClient(core, info)
    try:
        return with_server(client, ask, seconds=240, names=("demo",), system_start_date="2026-01-02"), core
    finally:
        asyncio.run(client.close())


def said(body: dict[str, Any]) -> Any:
    usage = body["usage"]
    return [body["choices"], usage["completion_tokens"], usage["prompt_tokens"]]


def check_same(found: Any, expected: Any) -> None:
    """Asserts that two answers are equal, log-probabilities within a tolerance."""
    if isinstance(expected, float):
        assert found == pytest.approx(expected, abs=1e-3)
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key in expected:
            check_same(found[key], expected[key])
    elif isinstance(expected, list):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            check_same(one, other)
    else:
        assert found == expected


@pytest.fixture(scope="module")
def expected() -> list[Any]:
    (found,), _ = answers(1)
    return found


@pytest.mark.parametrize("overlap", [pytest.param(False, marks=pytest.mark.slow), True])
def test_drafts_change_no_answer(expected: list[Any], overlap: bool) -> None:
    rounds, core = answers(2, SuffixDrafter(6), async_scheduling=overlap)
    for found in rounds:
        check_same(found, expected)
    assert core._scheduler.committer.num_accepted_tokens > 100


def test_drafts_of_the_demos_head_change_no_answer(expected: list[Any]) -> None:
    """Requests with penalties and formats wait for their drafts, the others do not."""
    head = SpeculativeConfig(method="eagle3", model="demo", num_speculative_tokens=3)
    (found,), core = answers(1, speculative_config=head, async_scheduling=True)
    check_same(found, expected)
    committer = core._scheduler.committer
    assert committer.num_accepted_tokens > max(50, 0.2 * committer.num_draft_tokens)


async def test_the_drafts_of_one_answer_add_up_to_those_of_the_engine() -> None:
    speculation = SpeculativeConfig(method="ngram", num_speculative_tokens=4)
    client = LocalClient(*build_engine(EngineConfig(model="demo", **ENGINE, speculative_config=speculation)))
    async with served(client, names=("demo",), spec_decode_metrics="detailed") as server:
        answer = await server.complete("one two one two one two", temperature=0, max_tokens=60)
        [choice], metrics = answer.json()["choices"], answer.json()["metrics"]
        assert choice["prompt_logprobs"] is choice["token_ids"] is None
        found, stats = metrics["speculative_decoding"], client.stats
        assert found["num_spec_steps"] == stats.num_drafts > 0
        assert sum(found["per_step_drafted"]) == found["num_draft_tokens"] == stats.num_draft_tokens
        assert sum(found["per_step_accepted"]) == stats.num_accepted_tokens
        several = await server.complete("one two", n=2, max_tokens=5)
        assert "metrics" not in several.json()
