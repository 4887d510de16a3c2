"""A small HTTP server in a thread, with files and one endpoint, for clients in other processes."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass
class HttpFiles:
    """``files``: path to content. ``failures``: path to statuses that come first. ``posts``: prompts."""

    url: str = ""
    files: dict[str, bytes] = field(default_factory=dict)
    failures: dict[str, list[int]] = field(default_factory=dict)
    posts: list[str] = field(default_factory=list)
    delay: float = 0.0


@contextlib.contextmanager
def http_files() -> Iterator[HttpFiles]:
    state = HttpFiles()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            content = state.files.get(self.path, b"{}" if self.path == "/v1/models" else None)
            self.answer(404 if content is None else 200, content or b"")

        def do_PUT(self) -> None:
            content = self.rfile.read(int(self.headers["content-length"]))
            if not state.failures.get(self.path):
                state.files[self.path] = content  # before the answer, at which a test looks for it
            self.answer(200, b"")

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            state.posts.append(body["prompt"])
            time.sleep(state.delay)
            usage = {"prompt_tokens": 3, "completion_tokens": 2}
            self.answer(200, json.dumps({"text": body["prompt"], "usage": usage}, indent=1).encode())

        def answer(self, status: int, content: bytes) -> None:
            waiting = state.failures.get(self.path)
            if waiting:
                status, content = waiting.pop(0), b""
            self.send_response(status)
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None: ...

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 64

        def handle_error(self, *_: object) -> None: ...  # ignores errors of killed clients

    server = Server(("127.0.0.1", 0), Handler)
    state.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield state
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
