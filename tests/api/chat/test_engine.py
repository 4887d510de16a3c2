"""Metrics of answers over the real engine core, with a fake device."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.local_client import on_fake_device
from tests.support.scripted import events_of
from tests.support.server import VOCAB, served


async def test_an_answer_of_one_choice_has_metrics_if_enabled() -> None:
    async with on_fake_device() as client, served(client, request_metrics=True) as server:
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
