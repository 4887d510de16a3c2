"""The checks of a server, run against servers with one fault each."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from chorale.config.engine import EngineConfig
from chorale.harmony import bpe, vocab
from chorale.harmony.vocab import load_vocabulary
from chorale.measure.selfcheck.check import Check, Found, Outcome, Plan
from chorale.measure.selfcheck.run import run_one
from chorale.measure.selfcheck.serving import harmony, record
from chorale.measure.selfcheck.serving.server import Server, ServerCheck
from chorale.requests.openai_client import AsyncClient, Endpoint
from chorale.serve.private_server import PrivateProcess


@pytest.fixture(scope="module")
def process() -> Iterator[subprocess.Popen[bytes]]:
    """A live process that stands for the one of a server."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as running:
        yield running
        running.communicate(b"\n")


Answer = Callable[[str, dict[str, Any]], Any]  # (path, body) -> the JSON of a response, or a response


def outcome(
    check: ServerCheck, answer: Answer, process: Any, tmp_path: Path, seconds: float = 20.0
) -> Outcome:
    """Runs a check with a function in place of the server."""

    def handle(request: httpx2.Request) -> httpx2.Response:
        found = answer(request.url.path, json.loads(request.content) if request.content else {})
        return found if isinstance(found, httpx2.Response) else httpx2.Response(200, json=found)

    async def run() -> Outcome:
        (tmp_path / "log").write_text("the last line")
        transport = httpx2.MockTransport(handle)
        async with AsyncClient(Endpoint("http://s/v1"), transport=transport) as client:
            started = PrivateProcess(process, tmp_path, tmp_path / "log")
            server = Server(Plan([], EngineConfig(), quick=True), started, client, "m", 4096)
            return await run_one(Check("stops", "server", "", seconds, ""), check, server)

    return asyncio.run(run())


def completion(text: str, ids: list[int], reason: str) -> dict[str, Any]:
    return {"choices": [{"text": text, "token_ids": ids, "finish_reason": reason}]}


def right_stops(path: str, body: dict[str, Any]) -> Any:
    token = int(next(iter(body["logit_bias"])))
    is_special = token > 199_000
    if body.get("stop_token_ids") or (is_special and not body.get("ignore_eos")):
        return completion("", [token], "stop")
    if body.get("stop"):
        return completion("hel", [token] * 2, "stop")
    return completion("" if is_special else "hello" * 8, [token] * 8, "length")


def wrong_stops(fault: str) -> Answer:
    def answer(path: str, body: dict[str, Any]) -> Any:
        found = right_stops(path, body)
        choice = found["choices"][0]
        if fault == "ignored" and "200012" in body["logit_bias"]:
            choice["finish_reason"] = "length"
        if fault == "shown" and choice["finish_reason"] == "stop" and not body.get("stop"):
            choice["text"] = "<|return|>"
        if fault == "stop string" and body.get("stop"):
            choice["text"] = "hello"
        if fault == "error":
            return httpx2.Response(500, text="broken")
        return found

    return answer


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("", "stop token 200012"),
        ("ignored", "stop token 200012: "),
        ("shown", "stop token 200002: "),
        ("stop string", "a stop string over two tokens: "),
        ("error", "/v1/completions: HTTP 500: broken"),
    ],
)
def test_faults_of_stops_are_named(fault: str, words: str, process: Any, tmp_path: Path) -> None:
    found = outcome(harmony.check_stops, wrong_stops(fault), process, tmp_path)
    assert (found.verdict, words in found.detail) == ("failed" if fault else "ok", True), found


def chat(message: dict[str, Any], reason: str = "stop") -> dict[str, Any]:
    return {"choices": [{"message": message, "finish_reason": reason}]}


@pytest.mark.parametrize(
    ("look", "code", "words"),
    [
        ('{"at": "sea", "times": 3}', "AB-123.x", ""),
        ('{"at": "sea", "times": 10}', "AB-123.x", "do not match their JSON Schema"),
        ('{"at": "sea", "times": 3', "AB-123.x", "do not match their JSON Schema"),
        ('{"at": "sea", "times": 3}', "AB-12", "regular expression"),
    ],
)
def test_answers_match_their_grammar(look: str, code: str, words: str, process: Any, tmp_path: Path) -> None:
    def answer(path: str, body: dict[str, Any]) -> Any:
        if path.endswith("chat/completions"):
            return chat({"content": look})
        return completion(code if "regex" in body["structured_outputs"] else look, [], "stop")

    found = outcome(harmony.check_grammar, answer, process, tmp_path)
    assert (found.verdict, words in found.detail) == ("failed" if words else "ok", True), found


# Each rule of the pretokenizer -> a wrong rule.
WRONG_RULES = {
    r"\p{N}{1,3}": r"\p{N}{1,2}",
    bpe.CONTRACTION: "",
    rf"[{bpe.UPPER}]+[{bpe.LOWER}]*": rf"[{bpe.UPPER}]+[{bpe.LOWER}]+",
    r" ?[^\s\p{L}\p{N}]+[\r\n/]*": r" ?[^\s\p{L}\p{N}]+[\r\n]*",
    r"\s*[\r\n]+|": "",
    r"\s+(?!\S)|": "",
}


@pytest.mark.parametrize("rule", ["", *WRONG_RULES])
def test_a_wrong_pretokenizer_rule_is_detected(
    rule: str, process: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert rule in vocab.PIECE_PATTERN
    pattern = vocab.PIECE_PATTERN.replace(rule, WRONG_RULES[rule]) if rule else vocab.PIECE_PATTERN
    monkeypatch.setattr(vocab, "PIECE_PATTERN", pattern)
    found = outcome(
        harmony.check_harmony, encoding_server(vocab.Vocabulary(vocab.read_ranks())), process, tmp_path
    )
    assert found.verdict == ("failed" if rule else "ok"), found


def encoding_server(encoder: vocab.Vocabulary, change: Callable[[list[int]], list[int]] = list) -> Answer:
    """Returns a server that encodes texts with ``encoder`` and changes the known tokens of a chat."""

    def answer(path: str, body: dict[str, Any]) -> Any:
        if path == "/tokenize":
            return {"tokens": encoder.encode(body["prompt"])}
        if path == "/detokenize":
            return {"prompt": encoder.decode(body["tokens"])}
        ids = json.loads(harmony.KNOWN_TOKENS.read_text())["chat"]
        return {**chat({"content": "x"}), "prompt_token_ids": [1, 2, *change(ids)]}

    return answer


@pytest.mark.parametrize("change", [lambda ids: ids[:-1], lambda ids: ids[:50] + ids[51:], lambda ids: []])
def test_a_wrongly_rendered_chat_is_detected(change: Any, process: Any, tmp_path: Path) -> None:
    found = outcome(harmony.check_harmony, encoding_server(load_vocabulary(), change), process, tmp_path)
    assert (found.verdict, "the end of a chat" in found.detail) == ("failed", True), found


def test_positive_log_probabilities_are_refused(process: Any, tmp_path: Path) -> None:
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
    assert "invalid" in outcome(record.check_record, scores(0.5), process, tmp_path).detail


def test_a_check_that_times_out_or_raises_has_an_outcome(process: Any, tmp_path: Path) -> None:
    async def slow(server: Server) -> Found:
        await asyncio.sleep(60)
        return Found("")

    async def broken(server: Server) -> Found:
        raise KeyError("choices")

    found = outcome(slow, right_stops, process, tmp_path, seconds=0.05)
    assert found.detail == "took longer than 0 s; its log ends: the last line"
    assert outcome(broken, right_stops, process, tmp_path).detail == "KeyError: 'choices'"
