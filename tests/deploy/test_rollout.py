"""docs/how-to/deploy.md: a server is replaced by another under load, and no request fails."""

from __future__ import annotations

import contextlib
import random
import signal
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import openai
import pytest

from tests.support.served import Served, serving

PERIOD = 1.0  # seconds between two probes; the server accepts requests for 5 s after SIGTERM


class Balancer:
    """A load balancer that knows which servers answered the last probe of /ready."""

    def __init__(self, *servers: Served) -> None:
        self.servers, self.ready = list(servers), list(servers)
        self.stopped = threading.Event()
        self.errors: list[BaseException] = []
        self.num_answers = 0

    def probe(self) -> None:
        while not self.stopped.wait(PERIOD):
            self.ready = [each for each in self.servers if each.is_at(200, "/ready")]

    def chats(self, seed: int) -> None:
        """Streams whole answers, each over a new connection to a ready server."""
        messages = [{"role": "user", "content": f"What is {seed} + 25?"}]
        while not self.stopped.is_set():
            with self.client() as client, self.counted():
                stream = client.chat.completions.create(
                    model="demo",
                    messages=messages,  # type: ignore[arg-type]
                    temperature=0,
                    stream=True,
                )
                parts = [chunk.choices[0] for chunk in stream if chunk.choices]
                assert parts[-1].finish_reason == "stop"
                assert str(seed + 25) in "".join(part.delta.content or "" for part in parts)

    def tokens(self) -> None:
        """Requests one token repeatedly, so that requests begin at every moment of the rollout."""
        while not self.stopped.is_set():
            with self.client() as client, self.counted():
                client.completions.create(model="demo", prompt="a", max_tokens=1)

    def client(self) -> openai.OpenAI:
        server = random.choice(self.ready)
        return openai.OpenAI(base_url=f"{server.url}/v1", api_key="-", max_retries=0, timeout=60)

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        try:
            yield
            self.num_answers += 1
        except Exception as error:
            self.errors.append(error)


@pytest.mark.slow
def test_no_request_fails_while_a_server_is_replaced(tmp_path: Path) -> None:
    options = ("--host", "0.0.0.0", "--shutdown-timeout", "60")
    with serving("demo", tmp_path, *options) as old:
        balancer = Balancer(old)
        work = [partial(balancer.chats, 17), partial(balancer.chats, 8), balancer.tokens, balancer.probe]
        threads = [threading.Thread(target=each) for each in work]
        for thread in threads:
            thread.start()
        try:
            with serving("demo", tmp_path, *options) as new:  # returns when it is ready
                balancer.servers.append(new)
                time.sleep(2 * PERIOD)
                before = balancer.num_answers
                old.process.send_signal(signal.SIGTERM)
                assert old.process.wait(timeout=60) == 0
                time.sleep(3 * PERIOD)
                balancer.stopped.set()
                for thread in threads:
                    thread.join()
        finally:
            balancer.stopped.set()
    assert balancer.errors == []
    assert before > 10
    assert balancer.num_answers > before + 10
