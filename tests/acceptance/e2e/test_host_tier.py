"""A server whose engine keeps KV pages in host memory and is killed in the middle of copies."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from pathlib import Path

import openai
import pytest

from tests.support.served import Served, serving

OPTIONS = (
    *("--kv-offloading-size", "0.2", "--num-gpu-blocks-override", "100", "--max-model-len", "1024"),
    *("--no-enable-log-requests", "--max-num-seqs", "8"),
)


def ask(client: openai.OpenAI, number: int) -> str:
    words = " ".join(f"word{(number * 31 + place) % 97}" for place in range(150))
    answer = client.completions.create(model="demo", prompt=words, max_tokens=8, temperature=0)
    return answer.choices[0].text


@pytest.mark.slow
def test_an_engine_that_is_killed_leaves_nothing_and_starts_again(tmp_path: Path) -> None:
    shared = set(os.listdir("/dev/shm"))
    with serving("demo", tmp_path, *OPTIONS) as served:
        client = served.client()
        expected = {number: ask(client, number) for number in range(12)}
        for _ in range(3):
            kill_under_load(served)
            served.wait_until("the engine is back", lambda: served.health() == 200, 60)
            for number in [*range(12), *range(12)]:
                assert ask(client, number) == expected[number]
            assert served.metric("vllm:external_prefix_cache_hits_total") > 0
            assert served.metric("chorale:host_kv_pages") > 0
    assert set(os.listdir("/dev/shm")) <= shared


def kill_under_load(served: Served) -> None:
    """Sends conversations with repeated prefixes while the engine gets SIGKILL."""
    stop = threading.Event()

    def load(start: int) -> None:
        client, number = served.client(), start
        while not stop.is_set():
            number += 1
            with contextlib.suppress(openai.APIError):
                ask(client, number % 12)

    threads = [threading.Thread(target=load, args=(start,)) for start in (0, 4, 8)]
    for thread in threads:
        thread.start()
    loads = served.metric("chorale:host_kv_loads_total")
    served.wait_until("loads", lambda: served.metric("chorale:host_kv_loads_total") > loads + 5, 60)
    [engine] = served.engine_pids()
    os.kill(engine, signal.SIGKILL)
    served.wait_until("the death is seen", lambda: served.health() == 503, 60)
    stop.set()
    for thread in threads:
        thread.join()
