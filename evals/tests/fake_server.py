"""A small OpenAI server in a thread; a function gives the answers."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answer = tuple[int, Any]  # (status, JSON body)


class FakeServer:
    """``answer(body, number)`` answers request ``number``, from 1; ``bodies`` has all request bodies."""

    def __init__(self, answer: Callable[[dict[str, Any], int], Answer]) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self._lock = threading.Lock()
        fake = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                self._send(200, {"object": "list", "data": [{"id": "fake", "root": "fake/model"}]})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                with fake._lock:
                    fake.bodies.append(body)
                    fake.paths.append(self.path)
                    number = len(fake.bodies)
                self._send(*answer(body, number))

            def _send(self, status: int, body: Any) -> None:
                data = body if isinstance(body, bytes) else json.dumps(body).encode()
                self.send_response(status)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(data)))
                self.send_header("retry-after", "0")
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: Any) -> None:
                pass

        class Quiet(ThreadingHTTPServer):
            def handle_error(self, *_: Any) -> None:
                """Ignores errors, because killed clients break their connections."""

        self._http = Quiet(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._http.server_port}/v1"

    @contextmanager
    def running(self) -> Iterator[FakeServer]:
        thread = threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self._http.shutdown()
            self._http.server_close()
            thread.join()


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
