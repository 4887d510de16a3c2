"""Metrics of answers over the real engine core, with a fake device."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from chorale.client.base import EngineInfo
from chorale.engine.core import EngineCore
from chorale.engine.types import EngineLimits
from tests.support.engine.fake_executor import FakeExecutor, FakeModel
from tests.support.local_client import LocalClient
from tests.support.scripted import events_of
from tests.support.server import VOCAB, Server, served

LIMITS = EngineLimits(
    num_blocks=400, block_size=16, max_num_seqs=16, max_num_batched_tokens=256, max_model_len=1024
)
INFO = EngineInfo(model="fake", max_model_len=1024, max_num_seqs=16)


@contextlib.asynccontextmanager
async def with_engine(**config: Any) -> AsyncIterator[Server]:
    model = FakeModel(eos_token_ids=INFO.eos_token_ids)
    client: Any = LocalClient(EngineCore(LIMITS, FakeExecutor(LIMITS, model)), INFO)
    try:
        async with served(client, **config) as server:
            yield server
    finally:
        await client.close()


async def test_an_answer_of_one_choice_has_metrics_if_enabled() -> None:
    async with with_engine(request_metrics=True) as server:
        fields: dict[str, Any] = {"ignore_eos": True, "allowed_token_ids": VOCAB.encode("a b"), "seed": 5}
        short = {**fields, "max_tokens": 30}
        streamed = {**short, "stream": True, "stream_options": {"include_usage": True}}
        answers = [
            (await server.chat(**short)).json(),
            (await server.complete(**short)).json(),
            (await server.complete(**fields, stop="a ba", max_tokens=900)).json(),
            events_of(await server.chat(**streamed))[-1],
            events_of(await server.complete(**streamed))[-1],
            await server.respond(input="hi", max_output_tokens=30),
        ]
        for answer in answers:
            count = answer["usage"].get("completion_tokens") or answer["usage"]["output_tokens"]
            metrics = answer["metrics"]
            seconds = (metrics["time_to_first_token_ms"] + metrics["generation_time_ms"]) / 1000
            assert metrics["tokens_per_second"] * seconds == pytest.approx(count)
            assert metrics["mean_itl_ms"] * (count - 1) == pytest.approx(metrics["generation_time_ms"])
            assert min(metrics["queue_time_ms"], metrics["generation_time_ms"]) > 0
        assert answers[2]["choices"][0]["stop_reason"] == "a ba"
        assert "metrics" not in (await server.complete(["a", "b"], **short)).json()
        assert "metrics" not in (await server.chat(n=2, **short)).json()
