"""A small OpenAI server in a thread; a function gives the answers."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import Any

from tests.support.http_server import Asked, HttpServer, Reply

Answer = tuple[int, Any]  # (status, JSON body)


class FakeServer(HttpServer):
    """``reply(body, number)`` answers request ``number``, from 1; ``bodies`` has all request bodies."""

    def __init__(self, reply: Callable[[dict[str, Any], int], Answer]) -> None:
        super().__init__()
        self.url += "/v1"
        self.bodies: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self._reply, self._lock = reply, threading.Lock()

    def answer(self, asked: Asked) -> Reply:
        if asked.method == "GET":
            return _json(200, {"object": "list", "data": [{"id": "fake", "root": "fake/model"}]})
        body = json.loads(asked.body)
        with self._lock:
            self.bodies.append(body)
            self.paths.append(asked.path)
            number = len(self.bodies)
        return _json(*self._reply(body, number))


def _json(status: int, body: Any) -> Reply:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return Reply(status, data, {"content-type": "application/json", "retry-after": "0"})


def chat(text: str, **more: Any) -> Answer:
    """Returns a chat completion. ``more``: ``reasoning``, ``tool_calls``, ``finish_reason``."""
    finish = more.pop("finish_reason", "stop")
    usage = {"prompt_tokens": 10, "completion_tokens": 3, "total_tokens": 13}
    choice = {"index": 0, "message": {"role": "assistant", "content": text, **more}, "finish_reason": finish}
    return 200, {"id": "x", "object": "chat.completion", "choices": [choice], "usage": usage}


def adding(body: dict[str, Any], _: int) -> Answer:
    """Answers "a + b" correctly, unless a is a multiple of seven."""
    a, b = body["messages"][-1]["content"].split(" + ")
    return chat(str(int(a) + int(b) + (int(a) % 7 == 0)))
