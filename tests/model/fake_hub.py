"""A hub on 127.0.0.1: the few endpoints that huggingface_hub's snapshot download calls.

It serves one repository at one commit, checks a token if it has one, can cut a download in the middle, and
counts what was asked of it.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def hub_environment(home: Path, **settings: str) -> dict[str, str]:
    """The environment of a process whose cache is in ``home``: ours, without what it says of hubs."""
    ours = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGING"))}
    return {**ours, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1", **settings}


class FakeHub:
    def __init__(self, repository: str, files: dict[str, bytes], token: str | None = None) -> None:
        self.repository = repository
        self.files = files
        self.token = token
        self.cut_after: int | None = None  # bytes of the next file body that get through
        self.sent: Counter[str] = Counter()  # body bytes by file
        self.asked: Counter[str] = Counter()  # bodies by file
        self.gate: threading.Event | None = None  # bodies of weights wait for it
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_HEAD(self) -> None:
                hub.answer(self, body=False)

            def do_GET(self) -> None:
                hub.answer(self, body=True)

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.02,))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}"

    def __enter__(self) -> FakeHub:
        self.thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()

    def answer(self, handler: BaseHTTPRequestHandler, body: bool) -> None:
        path = unquote(urlsplit(handler.path).path)
        if self.token and handler.headers.get("Authorization") != f"Bearer {self.token}":
            self._send(handler, 401, {"X-Error-Code": "RepoNotFound"}, b"{}", body)
        elif path in (f"/api/models/{self.repository}/revision/main", f"/api/models/{self.repository}"):
            info = {"id": self.repository, "sha": COMMIT, "siblings": [{"rfilename": f} for f in self.files]}
            self._send(handler, 200, {}, json.dumps(info).encode(), body)
        elif path.startswith(f"/api/models/{self.repository}/revision/"):
            self._send(handler, 404, {"X-Error-Code": "RevisionNotFound"}, b"{}", body)
        elif path == f"/api/models/{self.repository}/tree/{COMMIT}":
            tree = [
                {"type": "file", "path": name, "size": len(data), "oid": _etag(data)}
                for name, data in self.files.items()
            ]
            self._send(handler, 200, {}, json.dumps(tree).encode(), body)
        elif path.startswith(f"/{self.repository}/resolve/{COMMIT}/"):
            self._file(handler, path.split(f"/{COMMIT}/", 1)[1], body)
        else:
            self._send(handler, 404, {"X-Error-Code": "RepoNotFound"}, b"{}", body)

    def _file(self, handler: BaseHTTPRequestHandler, name: str, body: bool) -> None:
        data = self.files[name]
        headers = {"ETag": f'"{_etag(data)}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        wanted = handler.headers.get("Range", "")
        start = int(wanted.removeprefix("bytes=").partition("-")[0] or 0) if wanted else 0
        if start:
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        part = data[start:]
        self.asked[name] += body
        if body and self.gate is not None and name.endswith(".safetensors"):
            self.gate.wait(120)
        status = 206 if start else 200
        if body and self.cut_after is not None and len(part) > self.cut_after:
            handler.send_response(status)
            for key, value in {**headers, "Content-Length": str(len(part))}.items():
                handler.send_header(key, value)
            handler.end_headers()
            handler.wfile.write(part[: self.cut_after])
            self.sent[name] += self.cut_after
            handler.close_connection = True
            return
        if body:
            self.sent[name] += len(part)
        self._send(handler, status, headers, part, body)

    def _send(
        self, handler: BaseHTTPRequestHandler, status: int, headers: dict[str, str], data: bytes, body: bool
    ) -> None:
        handler.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(data))}.items():
            handler.send_header(key, value)
        handler.end_headers()
        if body:
            handler.wfile.write(data)


def _etag(data: bytes) -> str:
    return hashlib.sha1(data, usedforsecurity=False).hexdigest()
