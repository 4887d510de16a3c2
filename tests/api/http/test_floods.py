"""Floods on one connection: the event loop stays free, work is linear, and memory is bounded.

Each sends as fast as it can for a second. Limits and measuring: ``tests/support/worst_input.py``.
"""

from __future__ import annotations

import itertools

import pytest
import uvloop

from chorale.api.http.auth import hash_key
from tests.support.app import call, full_server
from tests.support.worst_input import Cost, flood, watched

SECONDS = 1.0
PIECE = 2**18
KEY = b"authorization: Bearer k\r\n"


def flooded(first: bytes, repeated: bytes, *, reads: bool = True, seconds: float = SECONDS) -> Cost:
    """The cost of ``first`` and then ``repeated`` without end; the server answers others afterwards."""

    async def main() -> Cost:
        async with full_server(keys=[hash_key("k")], access_log=False) as server:
            async with watched() as cost:
                piece = repeated * (PIECE // len(repeated))
                pieces = itertools.chain([first], itertools.repeat(piece))
                cost.num_bytes = await flood(server.port, pieces, seconds=seconds, reads=reads)
            assert (await call(server.port, "GET", "/health")).status == 200
        return cost

    return uvloop.run(main())


@pytest.mark.parametrize(
    ("path", "reads"),
    [
        (b"/health", True),
        (b"/health", False),
        (b"/v1/models", False),
        (b"/metrics", True),
        (b"/nowhere", False),
    ],
)
def test_pipelined_requests(path: bytes, reads: bool) -> None:
    """No key is needed to send them."""
    flooded(b"", b"GET %s HTTP/1.1\r\nhost: a\r\n\r\n" % path, reads=reads).check()


@pytest.mark.parametrize("key", [KEY, b""])
def test_a_body_in_chunks_of_one_byte(key: bytes) -> None:
    head = b"POST /v1/responses HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n" + key
    flooded(head + b"transfer-encoding: chunked\r\n\r\n", b"1\r\na\r\n").check()


HANDSHAKE = (
    b"GET /v1/responses HTTP/1.1\r\nhost: a\r\nconnection: Upgrade\r\nupgrade: websocket\r\n"
    + KEY
    + b"sec-websocket-version: 13\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
)
MASK = b"\x00" * 4


@pytest.mark.parametrize(
    ("first", "frame"),
    [
        (b"", b"\x8a\x80" + MASK),
        (b"", b"\x89\x80" + MASK),
        (b"", b"\x89\xfd" + MASK + b"p" * 125),
        (b"\x01\x80" + MASK, b"\x00\x80" + MASK),
        (b"\x01\x80" + MASK, b"\x00\x81" + MASK + b"a"),
        (b"", b"\x81\x82" + MASK + b"{}"),
    ],
    ids=["pong", "ping", "long ping", "empty continuation", "fragment of 1 byte", "message"],
)
def test_small_websocket_frames(first: bytes, frame: bytes) -> None:
    flooded(HANDSHAKE + first, frame).check()


def test_pings_of_a_client_that_does_not_read() -> None:
    flooded(HANDSHAKE, b"\x89\x80" + MASK, reads=False).check()


def test_a_megabyte_of_head() -> None:
    flooded(b"GET /health HTTP/1.1\r\nhost: a\r\nx: ", b"a").check()


def test_headers_without_a_value() -> None:
    flooded(b"GET /health HTTP/1.1\r\nhost: a\r\n", b"a:\r\n").check()
