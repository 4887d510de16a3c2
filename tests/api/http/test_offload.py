"""No body blocks the event loop: large ones are processed in threads, and excessive ones are refused.

Time limits are generous, because test machines are busy; a stall of seconds still exceeds them.
``benchmarks/serving/hostile_bodies.py`` measures the same against a real server.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from chorale.api.chat import prepare as chat_prepare
from chorale.api.http import body, offload
from chorale.api.http import responses as http
from chorale.api.http.offload import HEAVY, is_heavy
from chorale.api.limits import SIZES
from chorale.api.reasoning_tokens import read_reasoning, write_reasoning
from chorale.harmony.bpe import SLICE, LinearEncoder
from chorale.harmony.vocab import Vocabulary
from tests.support.scripted import playing
from tests.support.server import served

ANSWER = "<|channel|>final<|message|>ok<|return|>"


async def test_a_hostile_body_is_refused_before_it_is_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    """``test_floods.py`` tests the time that such bodies take, test_json_shape.py what is counted in them."""
    content = b'{"messages":[' + b"{}," * 5_000_000 + b"{}]}"

    def parse(*_: Any, **__: Any) -> None:
        raise AssertionError("parsed")

    async with served(playing(ANSWER)) as server:
        monkeypatch.setattr(body.json, "loads", parse)
        answer = await server.http.post(
            "/v1/chat/completions", content=content, headers={"content-type": "application/json"}
        )
        monkeypatch.undo()
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "json_too_large")


async def test_a_large_body_is_processed_in_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parsing, validation, conversion and encoding: each in a thread of ``offload``."""
    seen: dict[str, str] = {}

    def note(name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*values: Any, **named: Any) -> Any:
            seen[name] = threading.current_thread().name
            return work(*values, **named)

        return noted

    monkeypatch.setattr(body, "parse_object", note("parse", body.parse_object))
    for name in ("read_rules", "to_harmony", "render_conversation"):
        monkeypatch.setattr(chat_prepare, name, note(name, getattr(chat_prepare, name)))
    parts = [{"type": "text", "text": ""}] * 20_000
    async with served(playing(ANSWER, ANSWER)) as server:
        small = await server.chat("hi")
        assert small.status_code == 200, small.text
        assert set(seen.values()) == {threading.current_thread().name}, "small bodies stay on the loop"
        seen.clear()
        large = await server.http.post(
            "/v1/chat/completions", json={"messages": [{"role": "user", "content": parts}]}
        )
        assert large.status_code == 200, large.text
        assert len(seen) == 4
        assert all(name.startswith("chorale-heavy") for name in seen.values()), seen


@pytest.mark.parametrize(("path", "field"), [("/v1/completions", "prompt"), ("/tokenize", "prompt")])
async def test_a_long_raw_prompt_is_encoded_in_a_thread(
    path: str, field: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[str, str]] = []  # (encoded text, thread name)
    encode = Vocabulary.encode_with_special

    def noted(vocab: Vocabulary, text: str, *more: Any) -> list[int]:
        seen.append((text, threading.current_thread().name))
        return encode(vocab, text, *more)

    monkeypatch.setattr(Vocabulary, "encode_with_special", noted)
    async with served(playing("ok<|return|>")) as server:
        loop = threading.current_thread().name
        for text, in_thread in (("a b", False), ("a b " * HEAVY, True)):
            answer = await server.http.post(path, json={field: text})
            assert answer.status_code in (200, 400), answer.text  # 400: longer than the window
            (thread,) = [thread for encoded, thread in seen if encoded == text]
            assert thread.startswith("chorale-heavy") if in_thread else thread == loop


@pytest.mark.parametrize(
    ("value", "heavy"),
    [
        ("x" * HEAVY, False),
        ("x" * (HEAVY + 1), True),
        ([""] * (HEAVY // 16), True),
        ([{"a": ["x" * 100] * 3}] * 10, False),
        ([{"a": ["x" * 100] * 3}] * 200, True),
        ({str(number): None for number in range(3000)}, True),
        (None, False),
    ],
)
def test_values_beyond_the_weight_limit_are_heavy(value: Any, heavy: bool) -> None:
    assert is_heavy(value) is heavy
    assert is_heavy(None, [value]) is heavy or not heavy


def test_is_heavy_stops_at_the_weight_limit() -> None:
    looked: list[int] = []

    class Counted(str):
        def __len__(self) -> int:
            looked.append(1)
            return 0

    assert is_heavy([Counted() for _ in range(1000)]) is False
    assert len(looked) == 1000
    looked.clear()
    assert is_heavy([[Counted()] * 10_000] * 1000) is True
    assert len(looked) <= HEAVY


async def test_heavy_work_runs_in_at_most_two_threads() -> None:
    """Of any number of large bodies, two are processed at a time."""
    most = running = 0
    lock = threading.Lock()

    def work() -> None:
        nonlocal most, running
        with lock:
            running += 1
            most = max(most, running)
        time.sleep(0.01)
        with lock:
            running -= 1

    await asyncio.gather(*[offload.beside(work) for _ in range(12)])
    assert most == 2


async def test_answers_with_more_log_probabilities_than_allowed_are_refused() -> None:
    async with served(playing(ANSWER)) as server:
        for path, more in (
            ("prompt_logprobs", {"prompt_logprobs": 20}),
            ("echo", {"echo": True, "logprobs": 20}),
        ):
            answer = await server.complete([1000] * 12_500, **more)
            assert answer.status_code == 400, path
            assert answer.json()["error"]["param"] == "prompt_logprobs", json.dumps(answer.json())


WORDS = "word " * 600_000  # three times the context window
TOO_LONG: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": WORDS}]}),
    "a message that is continued": (
        "/v1/chat/completions",
        {
            "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": WORDS}],
            "continue_final_message": True,
            "add_generation_prompt": False,
        },
    ),
    "many messages": (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": WORDS[:50_000]}] * 60},
    ),
    "completions": ("/v1/completions", {"prompt": WORDS}),
    "special tokens": ("/v1/completions", {"prompt": "<|start|>" * 300_000}),
    "responses": ("/v1/responses", {"input": WORDS}),
    "messages": ("/v1/messages", {"max_tokens": 1, "messages": [{"role": "user", "content": WORDS}]}),
    "tokenize": ("/tokenize", {"prompt": WORDS}),
}


@pytest.mark.parametrize("name", TOO_LONG)
async def test_text_longer_than_any_window_is_encoded_only_partly(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Millions of ids take long to copy and to free, with the interpreter's lock held."""
    path, given = TOO_LONG[name]
    encode, longest = LinearEncoder.encode, [0]

    def measured(self: LinearEncoder, text: str, most: int | None = None) -> list[int]:
        ids = encode(self, text, most)
        longest[0] = max(longest[0], len(ids))
        return ids

    async with served(playing(ANSWER)) as server:
        monkeypatch.setattr(LinearEncoder, "encode", measured)
        answer = await server.http.post(path, json=given)
        error = answer.json()["error"]
        assert answer.status_code == 400, answer.text
        assert "maximum context length is" in error["message"]
        if path != "/v1/messages":
            param = next(key for key in ("messages", "prompt", "input") if key in given)
            assert (error["code"], error["param"]) == ("context_length_exceeded", param)
        assert longest[0] < SIZES["prompt_tokens"].max + SLICE


async def test_a_prompt_with_automatic_truncation_may_have_any_length() -> None:
    old = {"role": "user", "content": WORDS}
    async with served(playing(ANSWER)) as server:
        given = [old, {"role": "user", "content": "hi"}]
        answer = await server.http.post("/v1/responses", json={"input": given, "truncation": "auto"})
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["input_tokens"] < 200


@pytest.mark.parametrize(
    ("path", "given"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
        ("/v1/responses", {"input": "hi"}),
        ("/v1/messages", {"max_tokens": 99_999, "messages": [{"role": "user", "content": "hi"}]}),
    ],
)
async def test_a_long_answer_is_encoded_in_a_thread(
    path: str, given: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[str] = []
    make = http.json_response

    def noted(*values: Any, **named: Any) -> Any:
        threads.append(threading.current_thread().name)
        return make(*values, **named)

    monkeypatch.setattr(http, "json_response", noted)
    long = "<|channel|>final<|message|>" + "word " * 8_000 + "<|return|>"

    async with served(playing(long)) as server:
        answer = await server.http.post(path, json=given)
        assert answer.status_code == 200, answer.text
        assert len(answer.text) > HEAVY
        assert threads, "not encoded by large_response"
        assert threads[0].startswith("chorale-heavy")


def test_a_signature_longer_than_the_window_is_ignored() -> None:
    ids = [100_000] * 131_072
    assert read_reasoning(write_reasoning(ids)) == tuple(ids)
    assert read_reasoning(write_reasoning([*ids, 100_000])) == ()
    assert read_reasoning(write_reasoning([1] * 131_073)) == ()


async def test_the_signatures_of_a_request_share_one_token_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SIZES, "thought_tokens", replace(SIZES["thought_tokens"], max=1_000))
    thinking = {"type": "thinking", "thinking": "", "signature": write_reasoning([1000] * 400)}

    def body(count: int) -> dict[str, Any]:
        turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": [thinking] * count}]
        return {"max_tokens": 9, "messages": [*turns, {"role": "user", "content": "b"}]}

    async with served(playing(ANSWER, ANSWER)) as server:
        answer = await server.http.post("/v1/messages", json=body(2))
        assert answer.status_code == 200, answer.text
        answer = await server.http.post("/v1/messages", json=body(3))
        assert answer.status_code == 400, answer.text
        assert "messages[1].content[2].signature" in answer.json()["error"]["message"]
