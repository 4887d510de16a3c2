"""Clients that send raw bytes to a server, and handlers that record how they are called."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request

from chorale.api.http.responses import EventStream, json_response, read_json, until_disconnect
from tests.support import PATIENCE


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def code(self) -> str:
        return str(self.json["error"]["code"])


async def read_answer(reader: asyncio.StreamReader, *, has_body: bool = True) -> Answer:
    head = await reader.readuntil(b"\r\n\r\n")
    lines = head.decode("latin-1").split("\r\n")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines[1:] if line)}
    body = b""
    if "content-length" in headers and has_body:
        body = await reader.readexactly(int(headers["content-length"]))
    elif headers.get("transfer-encoding") == "chunked":
        while size := int(await reader.readuntil(b"\r\n"), 16):
            body += (await reader.readexactly(size + 2))[:-2]
        await reader.readexactly(2)
    return Answer(int(lines[0].split()[1]), headers, body)


_WRITERS: list[asyncio.StreamWriter] = []  # closed when the server ends


async def connect(port: int, limit: int = 2**16) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=limit)
    _WRITERS.append(writer)
    return reader, writer


async def close_connections() -> None:
    while _WRITERS:
        writer = _WRITERS.pop()
        writer.transport.abort()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def exchange(port: int, raw: bytes, timeout: float = PATIENCE, pause: float = 0.0) -> Answer:
    """Send raw bytes on a new connection and read one answer, after ``pause`` seconds."""
    reader, writer = await connect(port)
    try:
        writer.write(raw)
        await asyncio.sleep(pause)
        return await asyncio.wait_for(read_answer(reader, has_body=not raw.startswith(b"HEAD")), timeout)
    finally:
        writer.close()


async def call(
    port: int,
    method: str,
    path: str,
    data: Any = None,
    headers: dict[str, str] | None = None,
    body: bytes | None = None,
    pause: float = 0.0,
) -> Answer:
    raw = body if body is not None else (b"" if data is None else json.dumps(data).encode())
    fields = {"host": "localhost", "content-length": str(len(raw)), "content-type": "application/json"}
    lines = [f"{name}: {value}\r\n" for name, value in (fields | (headers or {})).items()]
    return await exchange(
        port, f"{method} {path} HTTP/1.1\r\n{''.join(lines)}\r\n".encode() + raw, pause=pause
    )


def handshake(headers: bytes = b"", path: bytes = b"/v1/responses") -> bytes:
    """Returns the request that opens a WebSocket; each of the further headers ends with a line's end."""
    return (
        b"GET %s HTTP/1.1\r\nhost: localhost\r\nconnection: Upgrade\r\nupgrade: websocket\r\n"
        b"sec-websocket-version: 13\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n%s\r\n"
    ) % (path, headers)


# --------------------------------------------------------------------------- handlers of tests


class Probe:
    """Handlers that record how they are called."""

    def __init__(self) -> None:
        self.started = asyncio.Event()
        self.closed = asyncio.Event()

    async def echo(self, request: Request) -> Any:
        return json_response(await read_json(request, request.app.state.config))

    async def slow(self, request: Request) -> Any:
        return json_response(await until_disconnect(request, self._wait()))

    async def hang(self, request: Request) -> Any:
        return EventStream(self._events(1))

    async def fault(self, request: Request) -> Any:
        raise ValueError("a secret detail")

    async def _wait(self) -> str:
        self.started.set()
        try:
            await asyncio.sleep(60)
        finally:
            self.closed.set()
        return "done"

    async def _events(self, number: int) -> AsyncGenerator[bytes]:
        try:
            for index in range(number):
                yield b"data: %d\n\n" % index
            self.started.set()
            await asyncio.sleep(60)
        finally:
            self.closed.set()
