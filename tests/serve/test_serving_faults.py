"""Effects of faults on HTTP clients: a drain that times out, a full queue."""

from __future__ import annotations

import asyncio
import http.client
import json
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.serve.test_supervisor import Supervised, ended, serve
from tests.support import PATIENCE
from tests.support.serve.harness import run, until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
SLOW = {"step_seconds": 0.02}


def complete(port: int, num_tokens: int, on_line: Callable[[str], None]) -> int:
    """Stream a completion, and call ``on_line`` with each data line. Returns the HTTP status."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    body = {"model": "m", "prompt": [1, 2, 3], "max_tokens": num_tokens, "stream": True, "ignore_eos": True}
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
        answer = connection.getresponse()
        for line in answer:
            if line.startswith(b"data: "):
                on_line(line.removeprefix(b"data: ").strip().decode())
        return answer.status
    finally:
        connection.close()


class Streams:
    """Completions that run in threads, and the lines that they have received."""

    def __init__(self, server: Supervised, count: int, num_tokens: int) -> None:
        self.lines: list[list[str]] = [[] for _ in range(count)]
        threads = ThreadPoolExecutor(count)
        self.tasks = [
            asyncio.wrap_future(threads.submit(complete, server.port, num_tokens, lines.append))
            for lines in self.lines
        ]
        threads.shutdown(wait=False)  # they end with their streams

    async def running(self) -> None:
        await until(lambda: all(len(lines) > 2 for lines in self.lines), "every stream has tokens")

    async def last_objects(self) -> list[dict[str, Any]]:
        """Wait until all streams have ended. Returns the last JSON object of each."""
        await asyncio.wait_for(asyncio.gather(*self.tasks), PATIENCE)
        return [json.loads([line for line in lines if line != "[DONE]"][-1]) for lines in self.lines]


def test_streams_end_with_an_error_when_a_drain_times_out() -> None:
    async def scene() -> None:
        settings = {"served_model_names": ["m"], "shutdown_timeout": 0.3}
        async with serve(behaviour=SLOW, server=settings) as s:
            await s.listening()
            await s.answers(200)
            streams = Streams(s, 4, 50_000)
            await streams.running()
            s.process.terminate()
            for last in await streams.last_objects():
                assert last["error"]["message"]
            assert await ended(s) == 0

    run(scene())


def test_a_full_queue_answers_429_until_clients_disconnect() -> None:
    async def scene() -> None:
        settings = {"served_model_names": ["m"], "max_queued_requests": 0}
        async with serve(behaviour=SLOW | {"max_num_seqs": 2}, server=settings) as s:
            await s.listening()
            await s.answers(200)
            leaving = [http.client.HTTPConnection("127.0.0.1", s.port, timeout=10) for _ in range(2)]
            body = {"model": "m", "prompt": [1], "max_tokens": 50_000, "stream": True, "ignore_eos": True}
            for connection in leaving:
                await asyncio.to_thread(
                    connection.request, "POST", "/v1/completions", json.dumps(body),
                    {"content-type": "application/json"},
                )  # fmt: skip
                answer = await asyncio.to_thread(connection.getresponse)
                assert answer.status == 200
            refused = Streams(s, 1, 3)
            assert await asyncio.wait_for(refused.tasks[0], PATIENCE) == 429
            for connection in leaving:
                connection.sock.close()
                connection.close()
            left, lines = time.monotonic(), list[str]()
            while (await asyncio.to_thread(complete, s.port, 1, lines.append)) != 200:
                assert time.monotonic() - left < PATIENCE  # the abandoned requests would take 1,000 s
            assert (
                lines[-1] == "[DONE]"
            )  # the engine has finished it; the status 200 alone does not show that

    run(scene())
