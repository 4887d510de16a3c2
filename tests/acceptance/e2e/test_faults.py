"""Faults, as clients of a real server with a real model see them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx2
import pytest

from tests.support.grammar.schema_cases import NASTY
from tests.support.served import Served, serving

pytestmark = pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="reads /proc")
BODY: dict[str, object] = {
    "model": "tiny", "prompt": "x", "max_tokens": 400, "stream": True, "ignore_eos": True, "temperature": 0,
}  # fmt: skip


@contextlib.asynccontextmanager
async def streaming(served: Served, count: int, **fields: object) -> AsyncIterator[list[AsyncIterator[str]]]:
    """Yields the lines of streamed completions after the first event of each; closes the connections."""
    limits = httpx2.Limits(max_connections=None)
    async with (
        httpx2.AsyncClient(base_url=served.url, timeout=60, limits=limits) as http,
        contextlib.AsyncExitStack() as stack,
    ):

        async def begun() -> AsyncIterator[str]:
            asked = http.stream("POST", "/v1/completions", json=BODY | fields)
            answer = await stack.enter_async_context(asked)
            assert answer.status_code == 200
            lines = answer.aiter_lines()
            assert (await anext(lines)).startswith("data: {")
            return lines

        # Kept here: a stream whose lines are collected as garbage is closed.
        streams = await asyncio.gather(*(begun() for _ in range(count)))
        yield streams


@pytest.fixture(scope="module")
def served(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Runs a server with 200 rows and no queue."""
    options = ("--served-model-name", "tiny", "--max-num-seqs", "200", "--max-queued-requests", "0")
    with serving(checkpoint, tmp_path_factory.mktemp("faults"), *options) as server:
        yield server


async def test_200_clients_that_leave_mid_stream_leave_nothing_behind(served: Served) -> None:
    """They leave no page, row or queued request: 200 others must fit at once."""
    for aborted in (200, 400):
        async with streaming(served, 200, max_tokens=100_000):
            served.wait_until("all run", lambda: served.metric("vllm:num_requests_running") == 200)
            assert served.metric("vllm:kv_cache_usage_perc") > 0
        served.wait_until("every row free", lambda: served.metric("vllm:num_requests_running") == 0)
        served.wait_until("every page free", lambda: served.metric("vllm:kv_cache_usage_perc") == 0)
        assert served.metric("vllm:num_requests_waiting") == 0
        assert served.metric("chorale:aborts_total") == aborted, "each left in mid-stream"
    assert served.health() == 200


# --------------------------------------------------------------------------- schemas

SECONDS = 2.0  # CPU time of a request, part of which the concurrent stream uses
VERDICTS = {
    "enum": "answered",
    "optional": "unsupported_value",
    "deep": "answered",
    "long": "answered",
    "many": "answered",
    "cube": "answered",
    "repeats": "unsupported_value",
    "lookback": "answered",
    "and": "unsupported_value",
    "doubling": "answered",
    "product": "unsupported_value",
}  # name -> the outcome of the request: an answer, or an error code

GAP = 0.5  # seconds between two tokens of the concurrent stream, on a busy machine with two cores


async def read_gaps(lines: AsyncIterator[str], gaps: list[float]) -> None:
    """Adds the seconds between two tokens to ``gaps``."""
    last = time.perf_counter()
    async for line in lines:
        if line.startswith("data: {"):
            now = time.perf_counter()
            gaps.append(now - last)
            last = now


async def test_nasty_schemas_slow_no_other_stream(served: Served) -> None:
    """The server runs in other processes; in one process the client would delay its own stream."""
    gaps: list[float] = []
    async with (
        httpx2.AsyncClient(base_url=served.url, timeout=30) as http,
        streaming(served, 1, max_tokens=100_000) as [lines],
    ):
        ask = {"model": "tiny", "prompt": "x", "max_tokens": 16}
        # The first request with a format also initialises state that all of them share.
        await http.post("/v1/completions", json={**ask, "guided_json": {"type": "boolean"}})
        beside = asyncio.create_task(read_gaps(lines, gaps))
        while len(gaps) < 5:
            await asyncio.sleep(0.01)
        gaps.clear()
        found: dict[str, str] = {}
        for name, schema in NASTY.items():
            start = served.cpu_seconds()
            answer = await http.post("/v1/completions", json={**ask, "guided_json": schema})
            found[name] = answer.json().get("error", {}).get("code", "answered")
            assert served.cpu_seconds() - start < SECONDS, name
        num_beside = len(gaps)
        while len(gaps) < num_beside + 5:
            assert not beside.done()
            await asyncio.sleep(0.01)
        beside.cancel()
        await asyncio.gather(beside, return_exceptions=True)
    assert found == VERDICTS
    assert max(gaps[1:]) < GAP, (max(gaps[1:]), len(gaps))


# --------------------------------------------------------------------------- deaths


async def test_the_server_recovers_when_its_engine_is_killed(served: Served) -> None:
    """Each client in flight gets an error object; the server answers again.

    On an idle machine this takes 2 s and 5 s. The limits here are for a busy one; the limit of the error is
    below the 10 s of silence after which a client considers an engine dead.
    """

    async def end_of(lines: AsyncIterator[str]) -> tuple[float, str]:
        events = [line.removeprefix("data: ") async for line in lines if line.startswith("data: {")]
        return time.monotonic(), events[-1]

    async with streaming(served, 8) as streams:
        asked = {"input": "x", "background": True, "ignore_eos": True, "max_output_tokens": 400}
        _, background = served.ask("/v1/responses", asked)
        ends = asyncio.gather(*map(end_of, streams))
        (pid,) = served.engine_pids()
        killed = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        await asyncio.to_thread(served.wait_until, "red health", lambda: served.health() == 503, 5.0)
        red = time.monotonic() - killed
        for at, last in await asyncio.wait_for(ends, 10):
            assert at - killed < 5.0
            assert json.loads(last)["error"]["code"] == "engine_restarted"
    served.wait_until("green again", lambda: served.health() == 200)
    back = time.monotonic() - killed
    assert served.ask("/v1/completions", BODY | {"stream": False, "max_tokens": 3})[0] == 200
    _, ended = served.ask(f"/v1/responses/{background['id']}")
    # The SDK has a closed list of codes for a response; the message contains Chorale's own code.
    assert (ended["status"], ended["error"]["code"]) == ("failed", "server_error")
    assert red < 5.0
    assert back < 30.0
