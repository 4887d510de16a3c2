"""The checks of a full KV pool and of a killed engine against servers that do one thing wrong each."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from chorale.selfcheck.serving import load
from chorale.selfcheck.serving.server import Server
from tests.support.selfcheck_server import Answer, metrics, outcome

FULL = {"kv_cache_usage_perc": 0.97, "num_requests_waiting": 2.0}
HALF = {"kv_cache_usage_perc": 0.5}
ERROR = 'data: {"error": {"message": "out of blocks"}}\n\n'


def filled(*peaks: dict[str, float], stream: str = "", restarts: float = 0.0) -> Answer:
    """A server whose metrics are ``peaks``, one by one, while it is filled; idle before and after."""
    states = itertools.chain([{}, *peaks], itertools.repeat({"engine_restarts_total": restarts}))

    def answer(path: str, body: dict[str, Any]) -> Any:
        if path == "/metrics":
            return metrics(**next(states))
        if body.get("stream"):
            return httpx2.Response(200, text=stream or 'data: {"choices": []}\n\n')
        return {"choices": [{"text": "x", "finish_reason": "length"}]}

    return answer


@pytest.mark.parametrize(
    ("answer", "verdict", "words"),
    [
        (filled(FULL), "ok", "97% of 65,536 tokens"),
        (filled(HALF, FULL, stream=ERROR), "failed", "requests failed: a request failed: data"),
        (filled(FULL, restarts=1.0), "failed", "the engine was restarted"),
        (filled(FULL | {"kv_cache_usage_perc": 0.4}), "failed", "only 40% of the pool"),
    ],
    ids=["right", "an error event", "a restart", "blocks that are never used"],
)
def test_memory(answer: Answer, verdict: str, words: str, process: Any, tmp_path: Path) -> None:
    found = outcome(load.check_memory, answer, process, tmp_path)
    assert (found.verdict, words in found.detail) == (verdict, True), found


def test_a_pool_that_takes_too_long_to_fill(
    process: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load, "_FILL_SECONDS", 1e-9)
    found = outcome(load.check_memory, filled(FULL), process, tmp_path)
    assert (found.verdict, "--kv-cache-memory-bytes" in found.detail) == ("skipped", True), found


class Engine:
    """A server whose engine process is a real one; another takes its place once it was killed."""

    def __init__(self, stream: str, answers: tuple[str, str], returns: bool) -> None:
        self.stream, self.answers, self.returns = stream, answers, returns
        self.victim = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)

    def is_dead(self) -> bool:
        return self.victim.poll() is not None

    def pids(self) -> list[int]:
        if not self.is_dead():
            return [self.victim.pid]
        return [1] if self.returns else []

    def answer(self, path: str, body: dict[str, Any]) -> Any:
        if path == "/metrics":
            return metrics()
        if path == "/health":
            return httpx2.Response(200)
        if body.get("stream"):
            return httpx2.Response(200, text=self.stream)
        return {"choices": [{"text": self.answers[self.is_dead()], "finish_reason": "length"}]}


@pytest.fixture
def engines() -> Iterator[list[Engine]]:
    started: list[Engine] = []
    yield started
    for engine in started:
        engine.victim.kill()
        engine.victim.communicate()


@pytest.mark.parametrize(
    ("stream", "answers", "returns", "words"),
    [
        (ERROR, ("a", "a"), True, ""),
        ('data: {"choices": []}\n\n', ("a", "a"), True, "without an error when its engine was killed"),
        (ERROR, ("a", "b"), True, "the engine that returned answers 'b'"),
        (ERROR, ("a", "a"), False, "took longer"),
    ],
    ids=["right", "an end without an error", "another answer", "no new engine"],
)
def test_kill(
    stream: str, answers: tuple[str, str], returns: bool, words: str, engines: list[Engine],
    process: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    engine = Engine(stream, answers, returns)
    engines.append(engine)
    monkeypatch.setattr(Server, "engine_pids", lambda self: engine.pids())
    found = outcome(load.check_kill, engine.answer, process, tmp_path, seconds=5.0 if returns else 1.5)
    assert engine.victim.wait(5) != 0
    assert (found.verdict, words in found.detail) == ("failed" if words else "ok", True), found
