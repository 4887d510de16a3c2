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
from pathlib import Path
from urllib.parse import unquote, urlsplit

from tests.support.http_server import Asked, HttpServer, Reply

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def hub_environment(home: Path, **settings: str) -> dict[str, str]:
    """The environment of a process whose cache is in ``home``: ours, without what it says of hubs."""
    ours = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGING"))}
    return {**ours, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1", **settings}


class FakeHub(HttpServer):
    def __init__(self, repository: str, files: dict[str, bytes], token: str | None = None) -> None:
        super().__init__()
        self.repository = repository
        self.files = files
        self.token = token
        self.cut_after: int | None = None  # bytes of the next file body that get through
        self.sent: Counter[str] = Counter()  # body bytes by file
        self.asked: Counter[str] = Counter()  # bodies by file
        self.gate: threading.Event | None = None  # bodies of weights wait for it

    def answer(self, asked: Asked) -> Reply:
        path = unquote(urlsplit(asked.path).path)
        if self.token and asked.headers.get("Authorization") != f"Bearer {self.token}":
            return Reply(401, b"{}", {"X-Error-Code": "RepoNotFound"})
        if path in (f"/api/models/{self.repository}/revision/main", f"/api/models/{self.repository}"):
            info = {"id": self.repository, "sha": COMMIT, "siblings": [{"rfilename": f} for f in self.files]}
            return Reply(200, json.dumps(info).encode())
        if path.startswith(f"/api/models/{self.repository}/revision/"):
            return Reply(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        if path == f"/api/models/{self.repository}/tree/{COMMIT}":
            tree = [
                {"type": "file", "path": name, "size": len(data), "oid": _etag(data)}
                for name, data in self.files.items()
            ]
            return Reply(200, json.dumps(tree).encode())
        if path.startswith(f"/{self.repository}/resolve/{COMMIT}/"):
            return self._file(asked, path.split(f"/{COMMIT}/", 1)[1])
        return Reply(404, b"{}", {"X-Error-Code": "RepoNotFound"})

    def _file(self, asked: Asked, name: str) -> Reply:
        data = self.files[name]
        headers = {"ETag": f'"{_etag(data)}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        wanted = asked.headers.get("Range", "")
        start = int(wanted.removeprefix("bytes=").partition("-")[0] or 0) if wanted else 0
        if start:
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        part, status = data[start:], 206 if start else 200
        if asked.method == "HEAD":
            return Reply(status, part, headers)
        self.asked[name] += 1
        if self.gate is not None and name.endswith(".safetensors"):
            self.gate.wait(120)
        if self.cut_after is not None and len(part) > self.cut_after:
            headers |= {"content-length": str(len(part)), "connection": "close"}
            part = part[: self.cut_after]
        self.sent[name] += len(part)
        return Reply(status, part, headers)


def _etag(data: bytes) -> str:
    return hashlib.sha1(data, usedforsecurity=False).hexdigest()
