"""HTTP servers in threads, for clients in other threads and processes: a subclass answers the requests."""

from __future__ import annotations

import ssl
import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Self


@dataclass(frozen=True)
class Asked:
    method: str
    path: str
    headers: Message  # names in any case
    body: bytes


@dataclass(frozen=True)
class Reply:
    """``headers`` may have a content-length, for a body that is cut."""

    status: int
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)


class HttpServer(ABC):
    """A context manager, in which the server runs."""

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def answer(self) -> None:
                body = self.rfile.read(int(self.headers.get("content-length", 0)))
                reply = server.answer(Asked(self.command, self.path, self.headers, body))
                self.send_response(reply.status)
                for name, value in {"content-length": str(len(reply.body)), **reply.headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(reply.body)

            do_GET = do_HEAD = do_POST = do_PUT = answer

            def log_message(self, *_: object) -> None: ...

        class Quiet(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 64

            def handle_error(self, *_: object) -> None: ...  # killed clients break their connections

        self._http = Quiet(("127.0.0.1", 0), Handler)
        if tls is not None:
            self._http.socket = tls.wrap_socket(self._http.socket, server_side=True)
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True)
        self.port = self._http.server_port
        self.url = f"http://127.0.0.1:{self.port}"

    @abstractmethod
    def answer(self, asked: Asked) -> Reply:
        """Answers a request, in a thread of its connection."""

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()
