"""``chorale serve demo --data-parallel-size 2``: two engines behind one port, as clients see them."""

from __future__ import annotations

import concurrent.futures
import json
import os
import signal
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.served import Served, at_once, serving

pytestmark = pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="reads /proc")
SUM = "What is 17 + 25?"


def health(server: Served) -> dict[str, Any]:
    with urllib.request.urlopen(f"{server.url}/health", timeout=5) as answer:
        return dict(json.loads(answer.read()))


def states(server: Served) -> list[str]:
    return [engine["status"] for engine in health(server)["engines"]]


def by_engine(server: Served, name: str) -> dict[str, float]:
    """A metric by engine. The parser refuses what Prometheus would: a name twice, a label twice."""
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=5) as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    assert len({family.name for family in families}) == len(families)
    found: dict[str, float] = {}
    for sample in (sample for family in families for sample in family.samples if sample.name == name):
        found[sample.labels["engine"]] = found.get(sample.labels["engine"], 0.0) + sample.value
    return found


def answered(server: Served) -> dict[str, float]:
    """Choices that finished, by engine. Each HTTP process tells the other its counts once a second."""
    time.sleep(2.5)
    return by_engine(server, "vllm:request_success_total")


def both_ready(server: Served) -> None:
    server.wait_until("both engines", lambda: states(server) == ["ready", "ready"], 60)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Two engines, and two HTTP processes, as many as engines."""
    with serving("demo", tmp_path_factory.mktemp("two"), "--data-parallel-size", "2") as server:
        both_ready(server)
        yield server


def user(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


def test_the_banner_and_the_processes(two: Served) -> None:
    two.wait_until("the banner", lambda: "ready in" in two.log.read_text())
    log = two.log.read_text()
    assert "engines   2 behind one port, 2 HTTP process(es)" in log
    assert len(two.engine_pids()) == 2


def test_flows_of_the_sdk(two: Served) -> None:
    client = two.client()

    def chat() -> str:
        body = client.chat.completions.create(model="demo", messages=user(SUM), temperature=0)
        return body.choices[0].message.content or ""

    def stream() -> str:
        with client.chat.completions.create(
            model="demo", messages=user(SUM), temperature=0, stream=True
        ) as chunks:
            return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)

    def respond() -> str:
        with client.responses.stream(model="demo", input=SUM, temperature=0) as events:
            kinds = [event.type for event in events]
            final = events.get_final_response()
        assert kinds[-1] == "response.completed"
        again = client.responses.create(
            model="demo", input="And 2 + 3?", previous_response_id=final.id, temperature=0
        )
        assert again.status == "completed"
        return str(final.output_text)

    found = at_once(chat, stream, respond, chat, stream, respond)
    assert "42" in found[0]
    assert set(found) == {found[0]}


def test_completions_of_several_prompts_and_choices(two: Served) -> None:
    client = two.client()
    prompts = [f"Sentence number {number} begins" for number in range(4)]
    asked: Any = {"model": "demo", "prompt": prompts, "n": 3, "max_tokens": 12, "seed": 5}
    found = client.completions.create(**asked, temperature=1)
    assert [choice.index for choice in found.choices] == list(range(12))
    assert found.usage is not None
    assert found.usage.completion_tokens <= 144
    again = client.completions.create(**asked, temperature=1)
    assert [choice.text for choice in again.choices] == [choice.text for choice in found.choices]


def conversations(server: Served, count: int, rounds: int) -> list[list[tuple[int, int]]]:
    """(prompt tokens, cached tokens) of each answer. The first questions come at once, so that the
    conversations begin wherever there is room; the others take turns.
    """
    client = server.client()
    topics = [
        f"{name} " * (60 + 9 * place)
        for place, name in enumerate(("red", "blue", "tea", "rain", "sea", "oak"))
    ]
    history: list[list[Any]] = [user(f"{topics[place]}. {SUM}") for place in range(count)]
    found: list[list[tuple[int, int]]] = [[] for _ in range(count)]

    def ask(place: int) -> None:
        answer = client.chat.completions.create(
            model="demo", messages=history[place], temperature=0, max_tokens=120
        )
        usage = answer.usage
        assert usage is not None
        assert usage.prompt_tokens_details is not None
        found[place].append((usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens or 0))
        history[place].append({"role": "assistant", "content": answer.choices[0].message.content or "-"})
        history[place] += user(f"What is {place + 3} + {len(found[place])}?")

    with concurrent.futures.ThreadPoolExecutor(count) as pool:
        list(pool.map(ask, range(count)))
    for _ in range(rounds - 1):
        for place in range(count):
            ask(place)
    return found


@pytest.mark.slow
def test_conversations_have_the_hits_of_one_engine(two: Served, demo_served: Served) -> None:
    """The first questions share the system message only as far as the engine that computes them has it."""
    before = by_engine(two, "vllm:prefix_cache_hits_total")
    earlier = answered(two)
    replicas = conversations(two, 4, 3)
    single = conversations(demo_served, 4, 3)
    for ours, theirs in zip(replicas, single, strict=True):
        assert ours[1:] == theirs[1:]  # (prompt, cached) of each round
        assert all(cached > prompt // 2 for prompt, cached in ours[1:])
    after = by_engine(two, "vllm:prefix_cache_hits_total")
    total = sum(after.values()) - sum(before.values())
    assert total == sum(cached for rounds in replicas for _, cached in rounds)
    later = answered(two)
    assert all(later[engine] > earlier.get(engine, 0) for engine in ("0", "1")), (earlier, later)


@pytest.mark.slow
def test_a_hot_prefix_uses_both_engines(two: Served) -> None:
    client = two.client()
    hot = "The quick brown fox. " * 60
    before = answered(two)

    def ask(number: int) -> int:
        usage = client.completions.create(
            model="demo", prompt=f"{hot} {number}", max_tokens=24, extra_body={"ignore_eos": True}
        ).usage
        assert usage is not None
        assert usage.prompt_tokens_details is not None
        return usage.prompt_tokens_details.cached_tokens or 0

    ask(0)
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        cached = list(pool.map(ask, range(1, 33)))
    after = answered(two)
    counts = [after[engine] - before.get(engine, 0) for engine in ("0", "1")]
    assert sum(counts) == 33
    assert min(counts) >= 8, counts
    assert sum(1 for each in cached if each > 0) >= 24, cached


def lasting(client: openai.OpenAI, number: int, on_first: Any = None) -> tuple[str, str]:
    """The text of a stream, and why it ended: "length", or the code of the error object."""
    text = ""
    try:
        stream = client.completions.create(
            model="demo", prompt=f"Story {number}: once upon a time", max_tokens=60, temperature=0,
            stream=True, extra_body={"ignore_eos": True},
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
    client = two.client()
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        expected = list(pool.map(lambda n: lasting(client, n), range(8)))
        assert {reason for _, reason in expected} == {"length"}
        begun: list[int] = []
        streams = [pool.submit(lasting, client, n, lambda: begun.append(1)) for n in range(8)]
        two.wait_until("all streams", lambda: len(begun) == 8, 60)
        assert all(value > 0 for value in by_engine(two, "vllm:num_requests_running").values())
        generated = by_engine(two, "vllm:generation_tokens_total")
        killed = time.monotonic()
        os.kill(two.engine_pids()[0], signal.SIGKILL)
        two.wait_until("one is gone", lambda: "ready" in (s := states(two)) and s != ["ready"] * 2, 5)
        (gone,) = [each for each in health(two)["engines"] if each["status"] != "ready"] or [{"engine": ""}]
        assert two.health() == 200
        assert set(by_engine(two, "vllm:num_requests_running")) == {"0", "1"}
        ends = [stream.result(120) for stream in streams]
    lost = [n for n, (_, reason) in enumerate(ends) if reason != "length"]
    assert 0 < len(lost) < 8
    for number, (text, reason) in enumerate(ends):
        if number in lost:
            assert reason == "engine_restarted"
            assert expected[number][0].startswith(text)
        else:
            assert text == expected[number][0]
    both_ready(two)
    assert time.monotonic() - killed < 90
    two.wait_until(
        "the restart is counted",
        lambda: sorted(by_engine(two, "chorale:engine_restarts_total").values()) == [0, 1],
    )
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda n: lasting(client, n), range(8))) == expected
    assert gone["engine"]
    # The two HTTP processes had heard of the dead engine's last tokens at different times, up to a second
    # apart, and go on counting from there: either may answer.
    two.wait_until(
        "it gets requests again",
        lambda: by_engine(two, "vllm:generation_tokens_total")[gone["engine"]] > generated[gone["engine"]],
    )


@pytest.mark.slow
def test_a_full_queue_is_that_of_both_engines(tmp_path: Path) -> None:
    options = ("-dp", "2", "--api-server-count", "1", "--max-num-seqs", "1", "--max-queued-requests", "1")
    with serving("demo", tmp_path, *options) as server:
        both_ready(server)
        client = server.client()
        with concurrent.futures.ThreadPoolExecutor(3) as pool:
            begun: list[int] = []
            streams = [pool.submit(lasting, client, n, lambda: begun.append(1)) for n in range(3)]
            server.wait_until(
                "two run and one waits", lambda: server.metric("vllm:num_requests_waiting") == 1
            )
            with pytest.raises(openai.RateLimitError) as full:
                client.completions.create(model="demo", prompt="x", max_tokens=2)
            assert int(full.value.response.headers["retry-after"]) >= 1
            assert [stream.result()[1] for stream in streams] == ["length"] * 3
        assert client.completions.create(model="demo", prompt="x", max_tokens=2).choices
        assert set(by_engine(server, "vllm:request_success_total")) == {"0", "1"}  # one HTTP process
