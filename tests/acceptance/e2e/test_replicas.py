"""``chorale serve demo --data-parallel-size 2``: two engines behind one port, seen by clients and gateways.

The expected blocks of KV events are computed from the render endpoint's tokens with hashlib alone.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import os
import re
import signal
import socket
import time
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Any

import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.serving import adapters as churn
from chorale.model.config import ModelConfig
from chorale.model.demo import ensure_demo
from tests.support.device.lora import write_adapter
from tests.support.ports import free_port
from tests.support.serve.kv_subscriber import Subscriber
from tests.support.served import Served, at_once, serving

pytestmark = pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="reads /proc")
LONG = "Consider the following text. " + "The quick brown fox jumps over the lazy dog. " * 20
MESSAGES: Any = [{"role": "user", "content": LONG}]


def post(server: Served, path: str, body: dict[str, Any]) -> Any:
    status, answer = server.ask(path, body)
    assert status == 200, answer
    return answer


def block_hashes(tokens: list[int], block_size: int, environment: str = "") -> list[int]:
    """Returns the chain of hashes of docs/reference/kv-events.md, for full blocks only."""
    secret = blake2b(environment.encode() or b"chorale", digest_size=16).digest()
    last = blake2b(b"salt:", key=secret, digest_size=16).digest()
    found = []
    for start in range(0, len(tokens) - block_size + 1, block_size):
        packed = b"".join(token.to_bytes(4, "little") for token in tokens[start : start + block_size])
        last = blake2b(last + packed, digest_size=16).digest()
        found.append(int.from_bytes(last[-8:], "big"))
    return found


def states(server: Served) -> list[str]:
    return [engine["status"] for engine in server.ask("/health")[1]["engines"]]


def by_engine(server: Served, name: str) -> dict[str, float]:
    """Returns a metric by engine. The parser rejects repeated names and labels, as Prometheus does."""
    families = list(text_string_to_metric_families(server.metrics()))
    assert len({family.name for family in families}) == len(families)
    found: dict[str, float] = {}
    for sample in (sample for family in families for sample in family.samples if sample.name == name):
        found[sample.labels["engine"]] = found.get(sample.labels["engine"], 0.0) + sample.value
    return found


def both_ready(server: Served) -> None:
    server.wait_until("both engines", lambda: states(server) == ["ready", "ready"], 60)


@pytest.fixture(scope="module")
def ports() -> tuple[int, int]:
    """Returns the base ports of two sockets; the port after each is free too."""
    return free_pair(), free_pair()


def free_pair() -> int:
    while True:
        port = free_port()
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("0.0.0.0", port + 1))
            return port


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory, ports: tuple[int, int]) -> Iterator[Served]:
    """Runs a server with two engines and, by default, two HTTP processes."""
    events = {
        "enable_kv_cache_events": True,
        "endpoint": f"tcp://*:{ports[0]}",
        "replay_endpoint": f"tcp://*:{ports[1]}",
        "topic": "kv@127.0.0.1:8000@demo",
    }
    options = ("--data-parallel-size", "2", "--kv-events-config", json.dumps(events))
    with serving("demo", tmp_path_factory.mktemp("two"), *options) as server:
        both_ready(server)
        yield server


@pytest.fixture(scope="module")
def heard(two: Served, ports: tuple[int, int]) -> Iterator[list[Subscriber]]:
    """Subscribes to each engine, at the base port plus the engine's rank."""
    found = [
        Subscriber(f"tcp://127.0.0.1:{ports[0] + rank}", f"tcp://127.0.0.1:{ports[1] + rank}", topic="kv@")
        for rank in range(2)
    ]
    yield found
    for each in found:
        each.close()


def test_the_banner_and_the_processes(two: Served) -> None:
    two.wait_until("the banner", lambda: "ready in" in two.log.read_text())
    log = two.log.read_text()
    assert "2 behind one port" in log
    assert len(two.engine_pids()) == 2


def lasting(client: openai.OpenAI, number: int, on_first: Any = None) -> tuple[str, str]:
    """Returns a stream's text and its finish reason or error code. Every second request is greedy."""
    text = ""
    try:
        stream = client.completions.create(
            model="demo", prompt=f"Story {number}: once upon a time", max_tokens=60,
            temperature=number % 2, seed=number, stream=True, extra_body={"ignore_eos": True},
        )  # fmt: skip
        for chunk in stream:
            text += chunk.choices[0].text
            if on_first is not None and text:
                on_first()
                on_first = None
            if chunk.choices[0].finish_reason:
                return text, chunk.choices[0].finish_reason
    except openai.APIError as error:
        return text, str(error.code)
    raise AssertionError("the stream ended without a reason")


def test_kill_9_of_one_engine_under_load(two: Served) -> None:
    """Every stream continues on the other engine and ends with the same text as without the kill."""
    client = two.client()
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        expected = list(pool.map(lambda n: lasting(client, n), range(8)))
        assert {reason for _, reason in expected} == {"length"}
        begun: list[int] = []
        streams = [pool.submit(lasting, client, n, lambda: begun.append(1)) for n in range(8)]
        two.wait_until("all streams", lambda: len(begun) == 8, 60)
        assert all(value > 0 for value in by_engine(two, "vllm:num_requests_running").values())
        both = [{"engine": number, "status": "ready"} for number in "01"]
        assert two.ask("/health") == (200, {"status": "ready", "engines": both})
        generated = by_engine(two, "vllm:generation_tokens_total")
        killed = time.monotonic()
        os.kill(two.engine_pids()[0], signal.SIGKILL)
        two.wait_until("one is gone", lambda: "ready" in (s := states(two)) and s != ["ready"] * 2, 5)
        (gone,) = [each for each in two.ask("/health")[1]["engines"] if each["status"] != "ready"] or [
            {"engine": ""}
        ]
        assert two.health() == two.ask("/ready")[0] == 200
        assert set(by_engine(two, "vllm:num_requests_running")) == {"0", "1"}
        ends = [stream.result(120) for stream in streams]
    assert ends == expected
    both_ready(two)
    assert time.monotonic() - killed < 90
    two.wait_until(
        "the restart is counted",
        lambda: sorted(by_engine(two, "chorale:engine_restarts_total").values()) == [0, 1],
    )
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda n: lasting(client, n), range(8))) == expected
    assert gone["engine"]
    # The HTTP processes received the dead engine's last counts up to a second apart, and continue from
    # different values: either may answer.
    two.wait_until(
        "it gets requests again",
        lambda: by_engine(two, "vllm:generation_tokens_total")[gone["engine"]] > generated[gone["engine"]],
    )


def test_an_endpoint_picker_finds_its_metrics(two: Served) -> None:
    """The picker of the Gateway API Inference Extension or of llm-d scores engines by these metrics."""
    for name in ("num_requests_waiting", "num_requests_running", "kv_cache_usage_perc"):
        assert by_engine(two, f"vllm:{name}").keys() == {"0", "1"}
    assert all(0 <= usage <= 1 for usage in by_engine(two, "vllm:kv_cache_usage_perc").values())
    assert set(by_engine(two, "vllm:cache_config_info").values()) == {1}
    assert by_engine(two, "vllm:lora_requests_info") == {}


def test_rendered_prompts_lead_to_the_blocks_of_the_events(two: Served, heard: list[Subscriber]) -> None:
    body = {"model": "demo", "messages": MESSAGES}
    rendered = post(two, "/v1/chat/completions/render", body)
    chain = block_hashes(rendered["token_ids"], 16)
    assert len(chain) > 10
    assert rendered["cache_salt"] is None
    answer = post(two, "/v1/chat/completions", body | {"max_tokens": 20})
    assert answer["usage"]["prompt_tokens"] == len(rendered["token_ids"])
    two.wait_until(
        "events of the prompt", lambda: hits(heard, chain) == [len(chain), 0] or hits(heard, chain)[1]
    )
    assert sorted(hits(heard, chain)) == [0, len(chain)]  # one engine computed it
    holder = hits(heard, chain).index(len(chain))
    assert heard[holder].ranks == {holder}
    prompt = post(two, "/v1/completions/render", {"prompt": LONG})[0]["token_ids"]
    post(two, "/v1/completions", {"prompt": LONG, "max_tokens": 1})
    raw = block_hashes(prompt, 16)
    two.wait_until("events of the raw prompt", lambda: max(hits(heard, raw)) == len(raw))


@pytest.mark.slow
def test_a_killed_engine_leaves_no_stale_block(two: Served, heard: list[Subscriber]) -> None:
    """After kill -9 during streams, subscribers drop its blocks and get those of the new engine."""
    client = two.client()
    chain = block_hashes(post(two, "/v1/chat/completions/render", {"messages": MESSAGES})["token_ids"], 16)
    post(two, "/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 1})
    two.wait_until("blocks", lambda: max(hits(heard, chain)) == len(chain))
    holder = hits(heard, chain).index(len(chain))
    clears = heard[holder].num_clears
    stream = client.chat.completions.create(model="demo", messages=MESSAGES, stream=True, max_tokens=2000)
    next(iter(stream))
    os.kill(pid_of(two, holder), signal.SIGKILL)
    with contextlib.suppress(openai.APIError):
        for _ in stream:
            pass
    two.wait_until("the new engine's first batch", lambda: read(heard) and heard[holder].num_clears > clears)
    assert heard[holder].blocks.get((0, "GPU"), set()) & set(chain) == set()
    two.wait_until("both engines", lambda: two.health() == 200 and len(two.engine_pids()) == 2)
    for _ in range(40):
        post(two, "/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 1})
        if max(hits(heard, chain)) == len(chain):
            break
    assert max(hits(heard, chain)) == len(chain)
    assert [each.num_lost for each in heard] == [0, 0]
    assert set(by_engine(two, "chorale:kv_event_batches_dropped_total").values()) == {0}


def test_the_server_drains_before_it_exits(two: Served, heard: list[Subscriber]) -> None:
    """After SIGTERM, readiness fails, streams finish, then it exits; the last batch clears the index."""
    client = two.client()
    stream = client.chat.completions.create(
        model="demo", messages=MESSAGES, stream=True, max_tokens=80, extra_body={"ignore_eos": True}
    )
    chunks = iter(stream)
    next(chunks)
    read(heard)  # requests missed batches while the engines can still answer
    two.process.send_signal(signal.SIGTERM)
    two.wait_until("not ready", lambda: not two.is_at(200, "/ready"))
    reasons = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices]
    assert reasons[-1] == "length"
    assert two.process.wait(20) == 0
    read(heard)
    assert [each.blocks for each in heard] == [{}, {}]


def read(heard: list[Subscriber]) -> bool:
    for each in heard:
        each.read(0.05)
    return True


def hits(heard: list[Subscriber], chain: list[int]) -> list[int]:
    """Returns for each engine how many leading blocks of a prompt it has."""
    read(heard)
    found = []
    for each in heard:
        known = each.blocks.get((0, "GPU"), set())
        found.append(next((i for i, block in enumerate(chain) if block not in known), len(chain)))
    return found


def pid_of(server: Served, rank: int) -> int:
    """Returns the pid of the engine with this rank, as the log names it."""
    lines = re.findall(rf"engine-{rank}\[(\d+)\]", server.log.read_text())
    pids = server.engine_pids()
    return next(pid for pid in map(int, reversed(lines)) if pid in pids) if lines else pids[rank]


@pytest.mark.slow
def test_adapters_reach_all_engines_and_outlive_a_kill_during_sleep(tmp_path: Path) -> None:
    write_adapter(tmp_path / "a", ModelConfig.load(ensure_demo()), "attention", 3)
    flags = ["--enable-lora", "--allow-runtime-lora-updating", "--lora-dirs", str(tmp_path)]
    flags += ["--enable-sleep-mode", "--api-server-count", "1"]
    body = {"model": "a", "prompt": "The sum of 2 and 3 is", "max_tokens": 12, "temperature": 0}
    with serving("demo", tmp_path, "-dp", "2", *flags) as server:
        load = {"lora_name": "a", "lora_path": str(tmp_path / "a")}
        churn.Load(server.url, tmp_path).post("/v1/load_lora_adapter", **load).close()

        def answers() -> set[str]:
            found = at_once(*[lambda: post(server, "/v1/completions", body)] * 6)
            return {each["choices"][0]["text"] for each in found}

        (expected,) = answers()
        assert {post(server, "/v1/completions", body | {"model": "demo"})["choices"][0]["text"]} != {expected}
        assert min(by_engine(server, "vllm:generation_tokens_total").values()) > 0
        for level in (1, 2):
            post(server, f"/sleep?level={level}", {})
            before = set(server.engine_pids())
            os.kill(min(before), signal.SIGKILL)
            server.wait_until("a successor", lambda before=before: set(server.engine_pids()) - before)
            both_ready(server)
            post(server, "/wake_up", {})
            assert answers() == {expected}


@pytest.mark.slow
@pytest.mark.parametrize("options", [[], ["-tp", "2"]], ids=["one rank", "two ranks"])
def test_adapters_come_and_go_under_load(options: list[str]) -> None:
    assert churn.main(["--minutes", "0.3", "--adapters", "12", "--clients", "3", "--", *options]) == 0
