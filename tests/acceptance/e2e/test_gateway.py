"""What a gateway's endpoint picker (Gateway API Inference Extension, llm-d) reads of a real server.

Two engines behind one port, with KV events. The metrics are read with the rules of Prometheus's text format
as Go's expfmt has them, blocks are computed from the render endpoint's tokens with nothing but hashlib.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.support.kv_subscriber import Subscriber
from tests.support.ports import free_port
from tests.support.served import Served, serving

pytestmark = pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="reads /proc")
LONG = "Consider the following text. " + "The quick brown fox jumps over the lazy dog. " * 20
MESSAGES: Any = [{"role": "user", "content": LONG}]


@pytest.fixture(scope="module")
def ports() -> tuple[int, int]:
    """Two ports for each socket, each followed by a free one."""
    return free_pair(), free_pair()


def free_pair() -> int:
    import socket

    while True:
        port = free_port()
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("0.0.0.0", port + 1))
            return port


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, ports: tuple[int, int]) -> Iterator[Served]:
    events = {
        "enable_kv_cache_events": True,
        "endpoint": f"tcp://*:{ports[0]}",
        "replay_endpoint": f"tcp://*:{ports[1]}",
        "topic": "kv@127.0.0.1:8000@demo",
    }
    options = ("--data-parallel-size", "2", "--kv-events-config", json.dumps(events))
    with serving("demo", tmp_path_factory.mktemp("gateway"), *options) as served:
        yield served


@pytest.fixture(scope="module")
def heard(server: Served, ports: tuple[int, int]) -> Iterator[list[Subscriber]]:
    """A subscriber to each engine, by the port that its rank adds to."""
    found = [
        Subscriber(f"tcp://127.0.0.1:{ports[0] + rank}", f"tcp://127.0.0.1:{ports[1] + rank}", topic="kv@")
        for rank in range(2)
    ]
    yield found
    for each in found:
        each.close()


def post(server: Served, path: str, body: dict[str, Any]) -> Any:
    data = json.dumps(body).encode()
    request = urllib.request.Request(server.url + path, data, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.loads(answer.read())


def block_hashes(tokens: list[int], block_size: int, environment: str = "") -> list[int]:
    """The chain of docs/kv-events.md, of whole blocks."""
    secret = blake2b(environment.encode() or b"chorale", digest_size=16).digest()
    last = blake2b(b"salt:", key=secret, digest_size=16).digest()
    found = []
    for start in range(0, len(tokens) - block_size + 1, block_size):
        packed = b"".join(token.to_bytes(4, "little") for token in tokens[start : start + block_size])
        last = blake2b(last + packed, digest_size=16).digest()
        found.append(int.from_bytes(last[-8:], "big"))
    return found


# ------------------------------------------------------------------ metrics

LINE = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})? (\S+)(?: \d+)?")
LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\\n]|\\["\\n])*)",?')
SUFFIXES = {"histogram": ("_bucket", "_sum", "_count"), "summary": ("", "_sum", "_count")}


def families(text: str) -> dict[str, tuple[str, list[tuple[str, dict[str, str], float]]]]:
    """Go's expfmt: a family is one TYPE line and the samples of its name that follow; a second TYPE line, a
    second HELP line, samples of a family in two places, a label or a sample twice are errors."""
    found: dict[str, tuple[str, list[tuple[str, dict[str, str], float]]]] = {}
    helped: set[str] = set()
    seen: set[tuple[str, frozenset[tuple[str, str]]]] = set()
    current = ""
    assert text.endswith("\n")
    for line in text.splitlines():
        if line.startswith("# HELP "):
            name = line.split(" ", 3)[2]
            assert name not in helped
            helped.add(name)
        elif line.startswith("# TYPE "):
            _, _, current, kind = line.split(" ")
            assert current not in found
            assert kind in ("counter", "gauge", "histogram", "summary", "untyped")
            found[current] = (kind, [])
        elif line:
            matched = LINE.fullmatch(line)
            assert matched is not None, line
            name, inner, value = matched.groups()
            labels = dict(LABEL.findall(inner or ""))
            assert sum(len(part) for part in LABEL.sub("", inner or "")) == 0, line
            assert len(labels) == len(LABEL.findall(inner or ""))
            kind = found[current][0]
            assert name in [current + suffix for suffix in SUFFIXES.get(kind, ("",))], (name, current)
            key = (name, frozenset(labels.items()))
            assert key not in seen
            seen.add(key)
            found[current][1].append((name, labels, float(value)))
    return found


def scrape(server: Served) -> dict[str, tuple[str, list[tuple[str, dict[str, str], float]]]]:
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=5) as answer:
        assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
        return families(answer.read().decode())


def test_a_picker_finds_its_metrics_and_scores_by_them(server: Served) -> None:
    found = scrape(server)
    values: dict[str, dict[str, float]] = {}
    for name in ("vllm:num_requests_waiting", "vllm:num_requests_running", "vllm:kv_cache_usage_perc"):
        kind, samples = found[name]
        assert kind == "gauge"
        assert [sorted(labels) for _, labels, _ in samples] == [["engine", "model_name"]] * 2
        values[name] = {labels["engine"]: value for _, labels, value in samples}
        assert sorted(values[name]) == ["0", "1"]
    kind, samples = found["vllm:cache_config_info"]
    assert kind == "gauge"
    for _, labels, value in samples:
        assert value == 1
        assert int(labels["block_size"]) == 16
        assert int(labels["num_gpu_blocks"]) > 16
    # kv-cache-utilization-scorer: what is free; queue-scorer: 1 for the shortest queue, 0 for the longest.
    usage, queue = values["vllm:kv_cache_usage_perc"], values["vllm:num_requests_waiting"]
    longest, shortest = max(queue.values()), min(queue.values())
    for engine in ("0", "1"):
        assert 0 <= 1 - usage[engine] <= 1
        score = 1.0 if longest == shortest else (longest - queue[engine]) / (longest - shortest)
        assert 0 <= score <= 1
    assert "vllm:lora_requests_info" not in found  # there are no adapters


# ------------------------------------------------------------------ events


def test_rendered_prompts_lead_to_the_blocks_of_the_events(server: Served, heard: list[Subscriber]) -> None:
    body = {"model": "demo", "messages": MESSAGES}
    rendered = post(server, "/v1/chat/completions/render", body)
    size = block_size(server)
    chain = block_hashes(rendered["token_ids"], size)
    assert len(chain) > 10
    assert rendered["cache_salt"] is None
    answer = post(server, "/v1/chat/completions", body | {"max_tokens": 20})
    assert answer["usage"]["prompt_tokens"] == len(rendered["token_ids"])
    wait(
        server, "events of the prompt", lambda: hits(heard, chain) == [len(chain), 0] or hits(heard, chain)[1]
    )
    assert sorted(hits(heard, chain)) == [0, len(chain)]  # one engine computed it
    holder = hits(heard, chain).index(len(chain))
    assert heard[holder].ranks == {holder}
    prompt = post(server, "/v1/completions/render", {"prompt": LONG})[0]["token_ids"]
    post(server, "/v1/completions", {"prompt": LONG, "max_tokens": 1})
    raw = block_hashes(prompt, size)
    wait(server, "events of the raw prompt", lambda: max(hits(heard, raw)) == len(raw))


@pytest.mark.slow
def test_a_killed_engine_leaves_no_stale_block(server: Served, heard: list[Subscriber]) -> None:
    """kill -9 in the middle of streams: subscribers forget its blocks, and learn those of its successor."""
    client = server.client()
    chain = block_hashes(post(server, "/v1/chat/completions/render", {"messages": MESSAGES})["token_ids"], 16)
    post(server, "/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 1})
    wait(server, "blocks", lambda: max(hits(heard, chain)) == len(chain))
    holder = hits(heard, chain).index(len(chain))
    clears = heard[holder].num_clears
    stream = client.chat.completions.create(model="demo", messages=MESSAGES, stream=True, max_tokens=2000)
    next(iter(stream))
    os.kill(pid_of(server, holder), signal.SIGKILL)
    with contextlib.suppress(openai.APIError):
        for _ in stream:
            pass
    wait(server, "the new engine's first batch", lambda: read(heard) and heard[holder].num_clears > clears)
    assert heard[holder].blocks.get((0, "GPU"), set()) & set(chain) == set()
    wait(server, "both engines", lambda: server.health() == 200 and len(server.engine_pids()) == 2)
    for _ in range(40):
        post(server, "/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 1})
        if max(hits(heard, chain)) == len(chain):
            break
    assert max(hits(heard, chain)) == len(chain)
    assert [each.num_lost for each in heard] == [0, 0]
    dropped = scrape(server)["chorale:kv_event_batches_dropped_total"][1]
    assert [value for _, _, value in dropped] == [0, 0]


def test_it_drains_before_it_ends(server: Served, heard: list[Subscriber]) -> None:
    """SIGTERM: not ready at once, streams finish, then the end; the last batch clears the index."""
    client = server.client()
    stream = client.chat.completions.create(
        model="demo", messages=MESSAGES, stream=True, max_tokens=80, extra_body={"ignore_eos": True}
    )
    chunks = iter(stream)
    next(chunks)
    server.process.send_signal(signal.SIGTERM)
    wait(server, "not ready", lambda: status(server, "/ready") in (503, None))
    reasons = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices]
    assert reasons[-1] == "length"
    assert server.process.wait(20) == 0
    read(heard)
    assert [each.blocks for each in heard] == [{}, {}]


def block_size(server: Served) -> int:
    _, samples = scrape(server)["vllm:cache_config_info"]
    return int(samples[0][1]["block_size"])


def status(server: Served, path: str) -> int | None:
    try:
        with urllib.request.urlopen(server.url + path, timeout=5) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return None  # it listens no more


def read(heard: list[Subscriber]) -> bool:
    for each in heard:
        each.read(0.05)
    return True


def hits(heard: list[Subscriber], chain: list[int]) -> list[int]:
    """Leading blocks of a prompt that each engine has."""
    read(heard)
    found = []
    for each in heard:
        known = each.blocks.get((0, "GPU"), set())
        found.append(next((i for i, block in enumerate(chain) if block not in known), len(chain)))
    return found


def pid_of(server: Served, rank: int) -> int:
    """The engine process that listens on the port of this rank: the one named so in the log."""
    lines = re.findall(rf"engine-{rank}\[(\d+)\]", server.log.read_text())
    pids = server.engine_pids()
    return next(pid for pid in map(int, reversed(lines)) if pid in pids) if lines else pids[rank]


def wait(server: Served, what: str, condition: Callable[[], object]) -> None:
    started = time.monotonic()
    while not condition():
        assert time.monotonic() - started < 40, f"{what}: not within 40 s\n{server.log.read_text()}"
        time.sleep(0.02)
