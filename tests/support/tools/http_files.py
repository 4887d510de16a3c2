"""A small HTTP server with files and one endpoint."""

from __future__ import annotations

import json
import time

from tests.support.http_server import Asked, HttpServer, Reply


class HttpFiles(HttpServer):
    """``files``: path to content. ``failures``: path to statuses that come first. ``posts``: prompts."""

    def __init__(self) -> None:
        super().__init__()
        self.files: dict[str, bytes] = {}
        self.failures: dict[str, list[int]] = {}
        self.posts: list[str] = []
        self.delay = 0.0

    def answer(self, asked: Asked) -> Reply:
        failures = self.failures.get(asked.path)
        if asked.method == "POST":
            prompt = json.loads(asked.body)["prompt"]
            self.posts.append(prompt)
            time.sleep(self.delay)
        if failures:
            return Reply(failures.pop(0))
        if asked.method == "POST":
            usage = {"prompt_tokens": 3, "completion_tokens": 2}
            return Reply(200, json.dumps({"text": prompt, "usage": usage}, indent=1).encode())
        if asked.method == "PUT":
            self.files[asked.path] = asked.body  # before the answer, at which a test looks for it
            return Reply(200)
        content = self.files.get(asked.path, b"{}" if asked.path == "/v1/models" else None)
        return Reply(404) if content is None else Reply(200, content)
