"""WebSocket frames: none is lost when reading pauses, and floods of small ones are refused."""

from __future__ import annotations

import asyncio
import logging
from socket import socket
from typing import Any

import pytest
import uvloop

from chorale.api.http.websocket import WebSocketProtocol
from tests.support.raw_http import call, exchange, handshake
from tests.support.server import served_on_port as served

RUN = uvloop.run
PING = b"\x89\x80\x00\x00\x00\x00"


def opened(port: int, with_handshake: bytes = b"") -> socket:
    """A plain socket after the handshake."""
    connection = socket()
    connection.settimeout(30)
    connection.connect(("127.0.0.1", port))
    connection.sendall(handshake() + with_handshake)
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        head += connection.recv(1)
    assert b" 101 " in head
    return connection


def read_frame(connection: socket) -> tuple[int, bytes]:
    def exactly(number: int) -> bytes:
        found = b""
        while len(found) < number:
            received = connection.recv(number - len(found))
            assert received
            found += received
        return found

    opcode, size = exactly(2)
    return opcode & 0xF, exactly(int.from_bytes(exactly(2), "big") if size == 126 else size)


async def test_frames_are_handled_again_once_the_client_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server stops reading while it cannot write. The test calls the transport's callbacks itself."""
    protocols: list[WebSocketProtocol] = []
    opens = WebSocketProtocol.open

    def spy(self: WebSocketProtocol, *args: Any) -> None:
        protocols.append(self)
        opens(self, *args)

    monkeypatch.setattr(WebSocketProtocol, "open", spy)
    async with served() as server:
        with await asyncio.to_thread(opened, server.port) as connection:
            for is_buffered in (False, True):  # whether the protocol, or only the kernel, has the frame
                protocols[0].pause_writing()
                if is_buffered:
                    protocols[0].data_received(PING)
                connection.sendall(PING)
                await asyncio.sleep(0.2)
                connection.settimeout(0.01)
                with pytest.raises(TimeoutError):
                    connection.recv(1)
                connection.settimeout(30)
                protocols[0].resume_writing()
                for _ in range(1 + is_buffered):
                    assert (await asyncio.to_thread(read_frame, connection))[0] == 10


async def test_frames_sent_with_the_handshake_keep_their_order() -> None:
    """The HTTP parser reads at most 64 kB with a head; later bytes must not overtake them."""
    text = b'{"type":"%s"}' % (b"a" * 60_000)
    large = b"\x81\xfe" + len(text).to_bytes(2, "big") + b"\x00" * 4 + text
    async with served() as server:

        def client() -> list[tuple[int, bytes]]:
            with opened(server.port, large + large + PING) as connection:
                return [read_frame(connection) for _ in range(3)]

        frames = await asyncio.to_thread(client)
        assert sorted(opcode for opcode, _ in frames) == [1, 1, 10]
        assert sum(b"unknown_event_type" in data for _, data in frames) == 2


@pytest.mark.parametrize("frame", [PING, b"\x8a\x80\x00\x00\x00\x00", b"\x00\x81\x00\x00\x00\x00a"])
async def test_a_flood_of_small_frames_is_closed_with_1008(frame: bytes) -> None:
    begin = b"\x01\x80\x00\x00\x00\x00" if frame[0] == 0 else b""
    async with served() as server:

        def client() -> tuple[int, bytes]:
            with opened(server.port) as connection:
                connection.sendall(begin + frame * 1_500)
                while True:
                    opcode, data = read_frame(connection)
                    if opcode != 10:
                        return opcode, data

        opcode, data = await asyncio.to_thread(client)
        assert (opcode, int.from_bytes(data[:2], "big")) == (8, 1008)


async def test_a_moderate_number_of_small_frames_is_allowed() -> None:
    async with served() as server:

        def client() -> int:
            with opened(server.port) as connection:
                connection.sendall(b"\x01\x80\x00\x00\x00\x00" + b"\x00\x80\x00\x00\x00\x00" * 500)
                connection.sendall(b"\x80\x82\x00\x00\x00\x00{}")
                return read_frame(connection)[0]

        assert await asyncio.to_thread(client) == 1


@pytest.mark.parametrize(
    "header", [b"sec-websocket-protocol: " + b"a" * 29_000 + b"\r\n", b"sec-websocket-key: x\r\n"]
)
async def test_a_malformed_handshake_is_answered_without_a_traceback(
    header: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async with served() as server:
        answer = await exchange(server.port, handshake(header))
        assert (answer.status, answer.code) == (400, "invalid_handshake")
        assert (await call(server.port, "GET", "/health")).status == 200
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []
