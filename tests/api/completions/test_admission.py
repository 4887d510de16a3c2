"""Admission of requests with many prompts and choices. Four choices may run and eight may wait."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.support.event_loop import until
from tests.support.local_client import on_fake_device
from tests.support.scripted import events_of
from tests.support.server import Server, served

LONG: dict[str, Any] = {"max_tokens": 400, "ignore_eos": True}


@contextlib.asynccontextmanager
async def with_engine(step_seconds: float = 0.0) -> AsyncIterator[Server]:
    async with (
        on_fake_device(max_num_seqs=4, max_queued_requests=8, step_seconds=step_seconds) as client,
        served(client) as server,
    ):
        yield server
        assert client._in_flight.admission.num_admitted == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_an_idle_server_admits_requests_that_fit_and_refuses_larger_ones(stream: bool) -> None:
    async with with_engine() as server:
        for prompts, n in ((12, 1), (6, 2), (3, 4), (1, 12)):
            response = await server.complete(["a"] * prompts, n=n, max_tokens=3, stream=stream)
            assert response.status_code == 200, response.text
            if not stream:
                assert len(response.json()["choices"]) == 12
            else:
                assert {c["index"] for e in events_of(response) for c in e["choices"]} == set(range(12))
        for prompts, n in ((13, 1), (7, 2), (1, 13), (256, 16)):
            response = await server.complete(["a"] * prompts, n=n, max_tokens=3, stream=stream)
            assert response.status_code == 400, response.text
            error = response.json()["error"]
            assert error["code"] == "too_many_choices"
            assert error["param"] == ("prompt" if prompts > 1 else "n")
            assert "retry-after" not in response.headers


@pytest.mark.parametrize("stream", [False, True])
async def test_a_busy_server_refuses_all_prompts_of_a_request_that_does_not_fit(stream: bool) -> None:
    async with with_engine(step_seconds=0.001) as server:
        running = asyncio.create_task(server.complete(["a"] * 2, **LONG))
        await until(lambda: server.client.num_in_flight >= 2)
        refused = await server.complete(["a"] * 11, max_tokens=3, stream=stream)
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) >= 1
        assert server.client.num_in_flight == 2  # none of its prompts was admitted
        admitted = await server.complete(["a"] * 10, max_tokens=3, stream=stream)
        assert admitted.status_code == 200
        assert (await running).status_code == 200


async def test_disconnects_and_errors_release_admission() -> None:
    async with with_engine(step_seconds=0.002) as server:
        left = asyncio.create_task(server.complete(["a"] * 12, **LONG))
        await until(lambda: server.client.num_in_flight >= 12)
        left.cancel()  # the client disconnects
        await asyncio.gather(left, return_exceptions=True)
        too_long = await server.complete([["x"] * 3], max_tokens=3)
        assert too_long.status_code == 400
        assert (await server.complete(["a"] * 12, max_tokens=3)).status_code == 200


async def test_choices_of_a_chat_count_together() -> None:
    async with with_engine() as server:
        assert (await server.chat(n=12, max_tokens=3)).status_code == 200
        refused = await server.chat(n=13, max_tokens=3)
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "n"
