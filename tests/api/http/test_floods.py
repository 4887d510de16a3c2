"""Floods on one connection: the event loop stays free, work is linear, and memory is bounded.

Each flood lasts ``SECONDS``. Limits and measuring: ``tests/support/fuzz/worst_input.py``.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import uvloop

from chorale.config.engine import hash_key
from tests.support.fuzz.worst_input import MAX_HELD_SECONDS, Cost, flood, watched
from tests.support.raw_http import call, connect, handshake, read_answer
from tests.support.server import VOCAB, served

SECONDS = 0.3
PIECE = 2**18
KEY = b"authorization: Bearer k\r\n"


def flooded(first: bytes, repeated: bytes, *, reads: bool = True, connections: int = 1) -> Cost:
    """Returns the cost of ``first`` and endless ``repeated``; asserts that the server still answers."""

    async def main() -> Cost:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(connections + 8))
        async with served(keys=[hash_key("k")], access_log=False, listens=True) as server:
            async with watched() as cost:
                piece = repeated * (PIECE // len(repeated))
                every = [itertools.chain([first], itertools.repeat(piece)) for _ in range(connections)]
                floods = (flood(server.port, pieces, seconds=SECONDS, reads=reads) for pieces in every)
                cost.num_bytes = sum(await asyncio.gather(*floods))
            assert (await call(server.port, "GET", "/health")).status == 200
        return cost

    return uvloop.run(main())


def check_flood(first: bytes, repeated: bytes, *, reads: bool = True, connections: int = 1) -> Cost:
    """Asserts the limits of the best of a few floods: a busy host adds to some (see ``check_best``)."""
    for _ in range(5):
        cost = flooded(first, repeated, reads=reads, connections=connections)
        if cost.held_seconds <= MAX_HELD_SECONDS:
            break
    cost.check()
    return cost


@pytest.mark.parametrize(("path", "reads"), [(b"/health", False), (b"/metrics", True)])
def test_pipelined_requests(path: bytes, reads: bool) -> None:
    """No key is needed to send them."""
    check_flood(b"", b"GET %s HTTP/1.1\r\nhost: a\r\n\r\n" % path, reads=reads)


def test_a_body_in_chunks_of_one_byte() -> None:
    head = b"POST /v1/responses HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n" + KEY
    check_flood(head + b"transfer-encoding: chunked\r\n\r\n", b"1\r\na\r\n")


HANDSHAKE = handshake(KEY)
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
    check_flood(HANDSHAKE + first, frame)


def test_messages_of_many_connections() -> None:
    cost = check_flood(HANDSHAKE, b"\x81\x82" + MASK + b"{}", connections=16)
    assert cost.held_seconds < 0.03  # usually 10 ms; 50 to 65 ms without turns


def test_pings_of_a_client_that_does_not_read() -> None:
    check_flood(HANDSHAKE, b"\x89\x80" + MASK, reads=False)


def test_a_megabyte_of_head() -> None:
    check_flood(b"GET /health HTTP/1.1\r\nhost: a\r\nx: ", b"a")


def test_headers_without_a_value() -> None:
    check_flood(b"GET /health HTTP/1.1\r\nhost: a\r\n", b"a:\r\n")


M = 10**6
BODIES = {
    "members": b'{"input":{' + b",".join(b'"k%d":1' % index for index in range(M)) + b"}}",
    "containers": b'{"input":[' + b"{}," * 5 * M + b"1]}",
    "integers": b'{"input":[' + b"1," * 250_000 + b"1]}",
    "escapes": b'{"user":"' + b"\\u00e4" * M + b'"}',
    "digits": b'{"temperature":0.' + b"1" * 16 * M + b"}",
    "text": b'{"input":"' + b"a b " * 4 * M + b'"}',
    "parts": b'{"input":[{"role":"user","content":['
    + b",".join([b'{"type":"input_text","text":"a"}'] * 16_000)
    + b"]}]}",
}
FIELD = b'--b\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nuser_data\r\n'
FILE = b'--b\r\ncontent-disposition: form-data; name="file"; filename="a"\r\n\r\n'
FORMS = {
    "near boundaries": FIELD + FILE + b"\r\n--" * 4 * M,
    "line ends": FIELD + FILE + b"\r\n" * 8 * M,
    "headers": b"--b\r\n" + b"a: b\r\n" * M,
    "parts": (b"--b\r\n\r\n\r\n") * M,
}


@pytest.mark.parametrize("body", BODIES.values(), ids=list(BODIES))
def test_large_json(body: bytes) -> None:
    for _ in range(4):  # a virtual processor that is suspended counts as CPU time
        cost = posted(b"/v1/responses", b"application/json", body)
        if cost.is_within(math.inf):
            break
    cost.check()


@pytest.mark.parametrize("form", FORMS.values(), ids=list(FORMS))
def test_large_forms(form: bytes, tmp_path: Path) -> None:
    body = form + b"\r\n--b--\r\n"
    posted(b"/v1/files", b"multipart/form-data; boundary=b", body, response_store=f"{tmp_path}/s.db").check()


def posted(path: bytes, kind: bytes, body: bytes, **config: str) -> Cost:
    VOCAB.encode("first use")  # loads the tokenizer, as a server does before it is ready

    async def main() -> Cost:
        async with served(access_log=False, **config, listens=True) as server:
            head = b"POST %s HTTP/1.1\r\nhost: localhost\r\ncontent-type: %s\r\n" % (path, kind)
            reader, writer = await connect(server.port)
            async with watched() as cost:
                answering = asyncio.create_task(read_answer(reader))
                writer.write(head + b"content-length: %d\r\nconnection: close\r\n\r\n" % len(body))
                for start in range(0, len(body), PIECE):
                    writer.write(body[start : start + PIECE])
                    await writer.drain()
                answer = await asyncio.wait_for(answering, 60)
                cost.num_bytes = len(body)
            assert answer.status in (200, 400)
        return cost

    return uvloop.run(main())
