"""The checks of a server against servers that do one thing wrong each."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx2
import pytest

from chorale.harmony.vocab import load_vocabulary
from chorale.selfcheck.check import Found
from chorale.selfcheck.serving import harmony, load, record
from chorale.selfcheck.serving.context import Context
from chorale.selfcheck.serving.server import Server
from tests.support.selfcheck_server import Answer, metrics, outcome


def completion(text: str, ids: list[int], reason: str) -> dict[str, Any]:
    return {"choices": [{"text": text, "token_ids": ids, "finish_reason": reason}]}


def right_stops(path: str, body: dict[str, Any]) -> Any:
    token = int(next(iter(body["logit_bias"])))
    text = load_vocabulary().decode([token])
    if token > 199_000 and not body.get("ignore_eos"):
        return completion("", [token], "stop")
    if body.get("stop_token_ids"):
        return completion("", [token], "stop")
    if body.get("stop"):
        return completion("hel", [token] * 2, "stop")
    return completion(text * 8, [token] * 8, "length")


def wrong_stops(fault: str) -> Answer:
    def answer(path: str, body: dict[str, Any]) -> Any:
        found = right_stops(path, body)
        choice = found["choices"][0]
        if fault == "goes on" and "200012" in body["logit_bias"]:
            choice["finish_reason"] = "length"
        if fault == "shown" and choice["finish_reason"] == "stop" and not body.get("stop"):
            choice["text"] = "<|return|>"
        if fault == "stop string" and body.get("stop"):
            choice["text"] = "hello"
        if fault == "error":
            return httpx2.Response(500, text="broken")
        return found

    return answer


def test_stops(process: Any, tmp_path: Path) -> None:
    assert outcome(harmony.check_stops, right_stops, process, tmp_path).verdict == "ok"
    for fault, words in (
        ("goes on", "token 200012 does not end"),
        ("shown", "token 200002 does not end"),
        ("stop string", "does not cut"),
        ("error", "gave 500: broken"),
    ):
        found = outcome(harmony.check_stops, wrong_stops(fault), process, tmp_path)
        assert (found.verdict, words in found.detail) == ("failed", True), found


def chat(message: dict[str, Any], reason: str = "stop") -> dict[str, Any]:
    return {"choices": [{"message": message, "finish_reason": reason}]}


def calls(arguments: str, name: str = "look") -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return chat({"content": None, "tool_calls": [{"id": "1", "function": function}]}, "tool_calls")


@pytest.mark.parametrize(
    ("required", "words"),
    [
        (calls('{"at": "sky", "times": 3}'), ""),
        (calls('{"at": "moon", "times": 3}'), "does not fit"),
        (calls('{"at": "sky"'), "not JSON"),
        (chat({"content": "no"}), "gave no call"),
    ],
)
def test_tools(required: dict[str, Any], words: str, process: Any, tmp_path: Path) -> None:
    def answer(path: str, body: dict[str, Any]) -> Any:
        return required if body["tool_choice"] == "required" else chat({"content": "clouds"})

    found = outcome(harmony.check_tools, answer, process, tmp_path)
    assert (found.verdict, words in found.detail) == ("failed" if words else "ok", True), found


@pytest.mark.parametrize(
    ("person", "code", "words"),
    [
        ('{"name": "Ann", "age": 7, "tags": ["a"], "married": false}', "AB-123.x", ""),
        ('{"name": "Ann", "age": 7, "tags": ["d"], "married": false}', "AB-123.x", "does not match its JSON"),
        ('{"name": "Ann", "age": 7', "AB-123.x", "not JSON"),
        ('{"name": "Ann", "age": 7, "tags": ["a"], "married": false}', "AB-12", "regular expression"),
    ],
)
def test_grammar(person: str, code: str, words: str, process: Any, tmp_path: Path) -> None:
    def answer(path: str, body: dict[str, Any]) -> Any:
        if path.endswith("chat/completions"):
            return chat({"content": person})
        return completion(code if "regex" in body["structured_outputs"] else person, [], "stop")

    found = outcome(harmony.check_grammar, answer, process, tmp_path)
    assert (found.verdict, words in found.detail) == ("failed" if words else "ok", True), found


@pytest.mark.parametrize("held", [{}, {"kv_cache_usage_perc": 0.01}, {"num_requests_running": 1.0}])
def test_disconnects(
    held: dict[str, float], process: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait = Server.wait_idle
    monkeypatch.setattr(Server, "wait_idle", lambda self, seconds: wait(self, 0.2))

    def answer(path: str, body: dict[str, Any]) -> Any:
        if path == "/metrics":
            return metrics(**held)
        if body.get("stream"):
            return httpx2.Response(200, text='data: {"choices": []}\n\n' * 9)
        return completion("x", [1], "length")

    found = outcome(load.check_disconnects, answer, process, tmp_path)
    assert found.verdict == ("failed" if held else "ok"), found
    assert all(name in found.detail for name in held)


def test_scores_that_are_no_log_probabilities(process: Any, tmp_path: Path) -> None:
    def scores(value: float) -> Answer:
        def answer(path: str, body: dict[str, Any]) -> Any:
            count, given = body["max_tokens"], len(body["prompt"])
            ranked = {"logprob": value}
            prompt = [None, *({str(token): ranked} for token in body["prompt"][1:])]
            return {
                "choices": [
                    {
                        "prompt_logprobs": prompt[:given],
                        "token_ids": [5] * count,
                        "logprobs": {
                            "token_logprobs": [value] * count,
                            "top_logprobs": [{"token_id:5": value}] * count,
                        },
                    }
                ]
            }

        return answer

    found = outcome(record.check_record, scores(-2.0), process, tmp_path)
    assert found.verdict == "ok"
    assert "perplexity of English 7" in found.detail
    assert "are not" in outcome(record.check_record, scores(0.5), process, tmp_path).detail


def test_a_check_that_takes_too_long_or_has_a_fault_of_its_own(process: Any, tmp_path: Path) -> None:
    async def slow(server: Server, context: Context) -> Found:
        await asyncio.sleep(60)
        return Found("")

    async def broken(server: Server, context: Context) -> Found:
        raise KeyError("choices")

    found = outcome(slow, right_stops, process, tmp_path, seconds=0.05)
    assert found.detail == "took longer than 0 s; its log ends: the last line"
    assert outcome(broken, right_stops, process, tmp_path).detail == "KeyError: 'choices'"
