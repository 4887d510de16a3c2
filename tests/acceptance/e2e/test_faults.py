"""Faults, as clients of a real server with a real model see them."""

from __future__ import annotations

import asyncio
import concurrent.futures
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

from tests.support.grammar.schema_cases import NASTY
from tests.support.served import Served, serving

pytestmark = pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="reads /proc")
BODY: dict[str, object] = {
    "model": "tiny", "prompt": "x", "max_tokens": 400, "stream": True, "ignore_eos": True, "temperature": 0,
}  # fmt: skip


def open_stream(port: int, body: dict[str, object] = BODY) -> socket.socket:
    """Starts a streaming completion on a raw socket and reads its first event."""
    raw = json.dumps(body).encode()
    connection = socket.create_connection(("127.0.0.1", port), timeout=60)
    head = (
        "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        f"content-length: {len(raw)}\r\n\r\n"
    )
    connection.sendall(head.encode() + raw)
    seen = b""
    while b"data: " not in seen:
        part = connection.recv(4096)
        assert part, seen
        seen += part
    assert b" 200 " in seen.split(b"\r\n", 1)[0], seen
    return connection


def events(connection: socket.socket) -> Iterator[bytes]:
    with connection, connection.makefile("rb") as reader:
        for line in reader:
            if line.startswith(b"data: "):
                yield line[6:].strip()
            if line.startswith(b"data: [DONE]"):
                return  # the connection is kept alive


@pytest.fixture(scope="module")
def served(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Runs a server with 200 rows and no queue."""
    options = ("--served-model-name", "tiny", "--max-num-seqs", "200", "--max-queued-requests", "0")
    with serving(checkpoint, tmp_path_factory.mktemp("faults"), *options) as server:
        yield server


def test_200_clients_that_leave_mid_stream_leave_nothing_behind(served: Served) -> None:
    """They leave no page, row or queued request: 200 others must fit at once."""
    endless = BODY | {"max_tokens": 100_000}
    with concurrent.futures.ThreadPoolExecutor(200) as pool:
        for aborted in (200, 400):
            connections = list(pool.map(lambda _: open_stream(served.port, endless), range(200)))
            served.wait_until("all run", lambda: served.metric("vllm:num_requests_running") == 200)
            assert served.metric("vllm:kv_cache_usage_perc") > 0
            for connection in connections:
                connection.close()
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


async def read_gaps(http: httpx2.AsyncClient, gaps: list[float], enough: asyncio.Event) -> None:
    """Streams until ``enough`` is set and adds the seconds between two tokens to ``gaps``."""
    body = BODY | {"max_tokens": 100_000}
    async with http.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200
        last = time.perf_counter()
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                now = time.perf_counter()
                gaps.append(now - last)
                last = now
            if enough.is_set():
                return


async def test_nasty_schemas_slow_no_other_stream(served: Served) -> None:
    """The server runs in other processes; in one process the client would delay its own stream."""
    gaps: list[float] = []
    enough = asyncio.Event()
    async with httpx2.AsyncClient(base_url=served.url, timeout=30) as http:
        ask = {"model": "tiny", "prompt": "x", "max_tokens": 16}
        # The first request with a format also initialises state that all of them share.
        await http.post("/v1/completions", json={**ask, "guided_json": {"type": "boolean"}})
        beside = asyncio.create_task(read_gaps(http, gaps, enough))
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
        enough.set()
        await beside
    assert found == VERDICTS
    assert max(gaps[1:]) < GAP, (max(gaps[1:]), len(gaps))


# --------------------------------------------------------------------------- deaths


def test_the_server_recovers_when_its_engine_is_killed(served: Served) -> None:
    """Each client in flight gets an error object; the server answers again.

    On an idle machine this takes 2 s and 5 s. The limits here are for a busy one; the limit of the error is
    below the 10 s of silence after which a client considers an engine dead.
    """
    connections = [open_stream(served.port) for _ in range(8)]
    asked = {"input": "x", "background": True, "ignore_eos": True, "max_output_tokens": 400}
    _, background = served.ask("/v1/responses", asked)
    ends: dict[int, tuple[float, bytes]] = {}

    def drain(index: int) -> None:
        last = b""
        for event in events(connections[index]):
            last = event if event != b"[DONE]" else last
        ends[index] = (time.monotonic(), last)

    threads = [threading.Thread(target=drain, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    (pid,) = served.engine_pids()
    killed = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    served.wait_until("red health", lambda: served.health() == 503, 5.0)
    red = time.monotonic() - killed
    for thread in threads:
        thread.join(10)
    assert len(ends) == 8
    for ended, last in ends.values():
        assert ended - killed < 5.0
        assert json.loads(last)["error"]["code"] == "engine_restarted"
    served.wait_until("green again", lambda: served.health() == 200)
    back = time.monotonic() - killed
    assert served.ask("/v1/completions", BODY | {"stream": False, "max_tokens": 3})[0] == 200
    _, ended = served.ask(f"/v1/responses/{background['id']}")
    # The SDK has a closed list of codes for a response; the message contains Chorale's own code.
    assert (ended["status"], ended["error"]["code"]) == ("failed", "server_error")
    assert red < 5.0
    assert back < 30.0
