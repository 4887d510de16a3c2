"""The protocol's limits over real sockets, with raw bytes: headers, bodies, timeouts."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import time
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest
import uvloop

from chorale.api.http import request_limits
from chorale.api.http.responses import EventStream
from chorale.errors import QueueFullError
from chorale.serve.http import protocol
from tests.support.raw_http import Probe, call, connect, exchange, read_answer
from tests.support.server import Server, served

RUN = uvloop.run
HEAD = b"POST /echo HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
_ENCODED = "unsupported_content_encoding"


def probed(probe: Probe | None = None, **config: Any) -> AbstractAsyncContextManager[Server]:
    probe = probe or Probe()
    handlers = {"/echo": probe.echo, "/slow": probe.slow, "/hang": probe.hang, "/fault": probe.fault}
    return served(listens=True, handlers=handlers, **config)


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


async def test_a_60_mb_header_is_431_and_costs_no_memory() -> None:
    async with probed() as server:
        reader, writer = await connect(server.port)
        writer.transport.set_write_buffer_limits(high=0)
        before = peak_bytes()

        async def flood() -> None:
            writer.write(b"GET /echo HTTP/1.1\r\nhost: localhost\r\nx-big: ")
            piece = b"a" * 2**20
            for _ in range(60):
                writer.write(piece)
                await writer.drain()

        flooding = asyncio.create_task(flood())
        answer = await asyncio.wait_for(read_answer(reader), 10)
        with contextlib.suppress(ConnectionError):
            await flooding
        assert answer.status == 431
        assert answer.code == "headers_too_large"
        assert peak_bytes() - before < 8 * 2**20


@pytest.mark.parametrize(
    ("raw", "status"),
    [
        (b"x-a: " + b"b" * 65_536 + b"\r\n\r\n", 431),
        (b"x-a: " + b"b" * 60_000 + b"\r\n\r\n", 200),
        (b"".join(b"x-%d: a\r\n" % index for index in range(127)) + b"\r\n", 431),
        (b"".join(b"x-%d: a\r\n" % index for index in range(120)) + b"\r\n", 200),
        (b"".join(b"x: a\r\n" for _ in range(500_000)) + b"\r\n", 431),
    ],
)
async def test_header_bytes_and_count_are_limited(raw: bytes, status: int) -> None:
    async with probed() as server:
        answer = await exchange(server.port, HEAD + b"content-length: 2\r\n" + raw + b"{}")
        assert answer.status == status


async def test_a_long_url_is_431() -> None:
    async with probed() as server:
        raw = b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nhost: localhost\r\n\r\n"
        assert (await exchange(server.port, raw)).status == 431


async def test_header_limits_apply_to_each_request_of_a_connection() -> None:
    async with probed() as server:
        one = HEAD + b"x-pad: " + b"p" * 40_000 + b"\r\ncontent-length: 2\r\n\r\n{}"
        reader, writer = await connect(server.port)
        writer.write(one * 5)
        for _ in range(5):
            assert (await asyncio.wait_for(read_answer(reader), 30)).status == 200
        writer.write(one)
        assert (await asyncio.wait_for(read_answer(reader), 30)).status == 200


OFFER = HEAD + b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABkAAQAAP__\r\n"


@pytest.mark.parametrize(
    "body",
    [
        b'content-length: 7\r\n\r\n{"a":1}',
        b'transfer-encoding: chunked\r\n\r\n3\r\n{"a\r\n4\r\n":1}\r\n0\r\n\r\n',
    ],
)
@pytest.mark.parametrize("at_once", [True, False])
async def test_an_offer_of_another_protocol_is_ignored(body: bytes, at_once: bool) -> None:
    """Java's HTTP client offers HTTP/2 with the first request of each connection, even one with a body."""
    async with probed() as server:
        reader, writer = await connect(server.port)
        everything = (OFFER + body) * 2 + HEAD + b'content-length: 7\r\n\r\n{"b":2}'
        pieces = [everything] if at_once else [bytes([byte]) for byte in everything]
        for piece in pieces:
            writer.write(piece)
            await asyncio.sleep(0)
        for expected in ({"a": 1}, {"a": 1}, {"b": 2}):
            answer = await asyncio.wait_for(read_answer(reader), 30)
            assert (answer.status, answer.json) == (200, expected)


async def test_the_body_of_an_upgrade_offer_is_not_parsed_as_a_request() -> None:
    """Also if the body arrives after the head."""
    async with probed() as server:
        reader, writer = await connect(server.port)
        hidden = b"GET /nowhere HTTP/1.1\r\nhost: localhost\r\n\r\n"
        writer.write(OFFER + b"content-length: %d\r\n\r\n" % len(hidden))
        await asyncio.sleep(0.2)
        writer.write(hidden)
        answer = await asyncio.wait_for(read_answer(reader), 30)
        assert (answer.status, answer.code) == (400, "invalid_json")
        writer.write(b"GET /echo HTTP/1.1\r\nhost: localhost\r\nconnection: upgrade\r\nupgrade: x\r\n\r\n")
        assert (await asyncio.wait_for(read_answer(reader), 30)).status == 415
        writer.write(HEAD + b"content-length: 2\r\n\r\n{}")
        assert (await asyncio.wait_for(read_answer(reader), 30)).status == 200


async def test_dripped_headers_end_in_408() -> None:
    async with probed(header_timeout=0.5) as server:
        reader, writer = await connect(server.port)
        began = time.monotonic()

        async def drip() -> None:
            for byte in HEAD * 10:
                writer.write(bytes([byte]))
                await asyncio.sleep(0.02)

        dripping = asyncio.create_task(drip())
        answer = await asyncio.wait_for(read_answer(reader), 60)
        dripping.cancel()
        assert (answer.status, answer.code) == (408, "request_timeout")
        assert time.monotonic() - began > 0.4


async def test_a_silent_connection_is_closed() -> None:
    async with probed(header_timeout=0.3) as server:
        reader, _ = await connect(server.port)
        assert await asyncio.wait_for(reader.read(), 60) == b""


async def test_the_header_timeout_applies_to_later_requests() -> None:
    async with probed(header_timeout=0.3) as server:
        reader, writer = await connect(server.port)
        writer.write(HEAD + b"content-length: 2\r\n\r\n{}")
        assert (await read_answer(reader)).status == 200
        await asyncio.sleep(0.5)  # idle time between requests does not count
        writer.write(b"GET /ec")
        assert (await asyncio.wait_for(read_answer(reader), 60)).status == 408


async def test_slow_heads_do_not_delay_other_connections() -> None:
    async with probed(header_timeout=600.0) as server:
        dripping = [await connect(server.port) for _ in range(200)]
        for _, writer in dripping:
            writer.write(b"GET /echo HTTP/1.1\r\nhost:")
        assert (await asyncio.wait_for(call(server.port, "POST", "/echo", {}), 60)).status == 200


@pytest.mark.parametrize(
    ("raw", "status", "code"),
    [
        (b"\x16\x03\x01\x02\x00nonsense\r\n\r\n", 400, "invalid_http"),
        (b"GET /echo HTTP/9.9\r\nhost: a\r\n\r\n", 400, "invalid_http"),
        (HEAD + b"content-length: 2\r\ntransfer-encoding: chunked\r\n\r\n{}", 400, "invalid_http"),
        (HEAD + b"content-length: 2\r\ncontent-length: 3\r\n\r\n{}", 400, "invalid_http"),
        (HEAD + b"transfer-encoding: chunked\r\n\r\nzz\r\n{}\r\n", 400, "invalid_http"),
        (HEAD + b"content-length: -2\r\n\r\n{}", 400, "invalid_http"),
        (b"POST /echo HTTP/1.1\r\ncontent-length: 0\r\n\r\n", 400, "invalid_host"),
        (b"POST /echo HTTP/1.1\r\nhost: a\r\nhost: b\r\ncontent-length: 0\r\n\r\n", 400, "invalid_host"),
        # Refused even if both are equal and valid.
        (
            b"POST /echo HTTP/1.1\r\nhost: localhost\r\nhost: localhost\r\ncontent-length: 0\r\n\r\n",
            400,
            "invalid_host",
        ),
        (b"GET /echo HTTP/1.1\r\nhost: a/b?c\r\n\r\n", 400, "invalid_host"),
        (b"GET /echo HTTP/1.1\r\nhost: evil.example\r\n\r\n", 400, "invalid_host"),
        (HEAD + b"content-length: 17000000\r\n\r\n", 413, "payload_too_large"),
        (HEAD + b"content-length: 3\r\n\r\n\xff{}", 400, "invalid_utf8"),
        (HEAD + b"content-length: 0\r\n\r\n", 400, "invalid_json"),
        (
            b"POST /echo HTTP/1.1\r\nhost: localhost\r\ncontent-length: 2\r\n\r\n{}",
            415,
            "unsupported_media_type",
        ),
        *(
            (HEAD + b"content-encoding: %s\r\ncontent-length: 2\r\n\r\n{}" % name, 415, _ENCODED)
            for name in (b"gzip", b"deflate", b"GZIP", b"br", b"identity, gzip", b"nonsense")
        ),
        (HEAD + b"content-encoding: identity\r\ncontent-length: 3\r\n\r\n\xff{}", 400, "invalid_utf8"),
        (b"GET /nowhere HTTP/1.1\r\nhost: localhost\r\n\r\n", 404, "unknown_url"),
        (b"DELETE /echo HTTP/1.1\r\nhost: localhost\r\n\r\n", 405, "method_not_allowed"),
        (b"GET //echo HTTP/1.1\r\nhost: localhost\r\n\r\n", 404, "unknown_url"),
    ],
)
async def test_invalid_requests_get_their_status_and_code(raw: bytes, status: int, code: str) -> None:
    async with probed() as server:
        answer = await exchange(server.port, raw)
        assert (answer.status, answer.code) == (status, code)
        assert answer.json["error"].keys() == {"message", "type", "param", "code"}
        assert (await call(server.port, "POST", "/echo", {"still": "here"})).json == {"still": "here"}


async def test_local_host_names_are_served() -> None:
    async with probed() as server:
        for host in ("localhost", f"localhost:{server.port}", "127.0.0.1", "[::1]:8000", "a.localhost"):
            assert (await call(server.port, "POST", "/echo", {}, {"host": host})).status == 200, host


@pytest.mark.parametrize("chunked", [False, True])
async def test_a_body_over_the_limit_is_413_even_while_it_is_being_sent(chunked: bool) -> None:
    async with probed(max_body_bytes=1_000_000) as server:
        reader, writer = await connect(server.port)
        framing = b"transfer-encoding: chunked\r\n" if chunked else b"content-length: 3000000\r\n"
        writer.write(HEAD + framing + b"\r\n")
        piece = b"a" * 100_000
        for _ in range(30):
            writer.write((b"%x\r\n%s\r\n" % (len(piece), piece)) if chunked else piece)
        if chunked:
            writer.write(b"0\r\n\r\n")
        answer = await asyncio.wait_for(read_answer(reader), 10)
        assert (answer.status, answer.code) == (413, "payload_too_large")


async def test_a_client_is_not_told_to_send_a_body_that_is_refused() -> None:
    async with probed(max_body_bytes=1_000_000) as server:
        head = HEAD + b"expect: 100-continue\r\ncontent-length: 3000000\r\n\r\n"
        assert (await exchange(server.port, head)).status == 413


async def test_dripped_and_idle_bodies_are_408() -> None:
    async with probed(body_timeout=0.4) as server:
        for drip in (True, False):
            reader, writer = await connect(server.port)
            writer.write(HEAD + b"content-length: 1000\r\n\r\n")
            answering = asyncio.create_task(read_answer(reader))
            while drip and not answering.done():
                writer.write(b" ")
                await asyncio.sleep(0.05)
            answer = await asyncio.wait_for(answering, 30)
            assert (answer.status, answer.code) == (408, "request_timeout")
            assert answer.headers["connection"] == "close"


async def test_a_body_below_the_minimum_rate_is_408_even_after_a_fast_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(request_limits, "RATE_SECONDS", 0.3)
    async with probed(min_upload_rate=1000, body_timeout=600.0) as server:
        reader, writer = await connect(server.port)
        writer.write(HEAD + b"content-length: 3000000\r\n\r\n" + b" " * 1_000_000)
        answering = asyncio.create_task(read_answer(reader))
        async with asyncio.timeout(30):
            while not answering.done():
                writer.write(b" ")
                await asyncio.sleep(0.05)
        answer = await answering
        assert (answer.status, answer.code) == (408, "request_timeout")


async def test_a_client_that_does_not_read_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "WRITE_TIMEOUT_SECONDS", 0.5)
    closed = asyncio.Event()

    async def flood() -> Any:
        try:
            while True:
                await asyncio.sleep(0)
                yield b"x" * 100_000
        finally:
            closed.set()

    async def handler(request: Any) -> Any:
        return EventStream(flood())

    async with served(handlers={"/flood": handler}, listens=True) as server:
        _, writer = await connect(server.port, limit=1000)
        writer.write(b"GET /flood HTTP/1.1\r\nhost: localhost\r\n\r\n")
        await asyncio.wait_for(closed.wait(), 30)


def chunked(*chunks: bytes) -> bytes:
    return HEAD + b"transfer-encoding: chunked\r\n\r\n" + b"".join(chunks)


END = b"0\r\n\r\n"


@pytest.mark.parametrize(
    ("chunks", "status"),
    [
        ([b"2;" + b"x" * 100_000 + b"\r\n{}\r\n", END], 400),
        ([b"2\r\n{}\r\n", b"0;" + b"x" * 100_000 + b"\r\n\r\n"], 400),
        ([b"2\r\n{}\r\n", b"0\r\nx-trailer: " + b"x" * 100_000 + b"\r\n\r\n"], 400),
        ([b"2;" + b"x" * 200 + b"\r\n{}\r\n", END], 200),
        (
            [b"1\r\n{\r\n", *[b"1;chunk-signature=" + b"0" * 64 + b"\r\n \r\n"] * 5_000, b"1\r\n}\r\n", END],
            200,
        ),
        ([b"30D42\r\n{" + b" " * 200_001 + b"\r\n1\r\n}\r\n", END], 200),
    ],
)
async def test_the_overhead_of_chunked_bodies_is_limited(chunks: list[bytes], status: int) -> None:
    async with probed() as server:
        for _ in range(2):
            answer = await exchange(server.port, chunked(*chunks))
            assert answer.status == status
            if status == 400:
                assert answer.code == "invalid_http"
        # The same in pieces, and twice on one connection.
        reader, writer = await connect(server.port)
        for data in (chunked(*chunks), chunked(*chunks)):
            for start in range(0, len(data), 10_000):
                writer.write(data[start : start + 10_000])
                await asyncio.sleep(0)
            answer = await asyncio.wait_for(read_answer(reader), 10)
            assert answer.status == status
            if status == 400:
                break


# --------------------------------------------------------------------------- several requests


def numbered(number: int, is_chunked: bool) -> bytes:
    body = b'{"number": %d, "pad": "\\r\\n\\r\\n"}' % number
    if is_chunked:
        return chunked(*(b"%x\r\n%s\r\n" % (len(chunk), chunk) for chunk in (body[:5], body[5:])), END)
    return HEAD + b"content-length: %d\r\n\r\n%s" % (len(body), body)


@pytest.mark.parametrize("piece", [1, 3, 1000, 70_000])
@pytest.mark.parametrize("is_chunked", [False, True])
async def test_pipelined_requests_are_answered_in_order(piece: int, is_chunked: bool) -> None:
    """Whatever pieces they arrive in. At most one waits behind the running one; the rest is not read."""
    number = 100 if piece < 1000 else (10 if is_chunked else 500)
    async with probed() as server:
        reader, writer = await connect(server.port)
        everything = b"".join(numbered(index, is_chunked) for index in range(number))

        async def send() -> None:
            for start in range(0, len(everything), piece):
                writer.write(everything[start : start + piece])
                await writer.drain()
                await asyncio.sleep(0)

        sending = asyncio.create_task(send())
        for index in range(number):
            answer = await asyncio.wait_for(read_answer(reader), 30)
            assert (answer.status, answer.json["number"]) == (200, index)
        await sending


async def test_requests_behind_a_slow_one_are_not_read() -> None:
    probe = Probe()
    async with probed(probe) as server:
        _, writer = await connect(server.port)
        writer.transport.set_write_buffer_limits(high=0)
        writer.write(b"GET /slow HTTP/1.1\r\nhost: localhost\r\n\r\n")
        await asyncio.wait_for(probe.started.wait(), 30)
        sent = 0
        with contextlib.suppress(TimeoutError):
            while sent < 2**28:
                async with asyncio.timeout(0.3):
                    writer.write(b"GET /slow HTTP/1.1\r\nhost: localhost\r\n\r\n" * 10_000)
                    await writer.drain()
                sent += 1
        assert sent < 100  # the socket's buffers are full
        assert server.state.lifecycle.num_requests == 1


async def test_many_requests_behind_a_chunked_body_are_refused() -> None:
    """The end of a chunked body is known only after parsing."""
    async with probed() as server:
        reader, writer = await connect(server.port)
        rest = b"GET /nowhere HTTP/1.1\r\nhost: localhost\r\n\r\n"
        writer.write(chunked(b"2\r\n{}\r\n"))
        await asyncio.sleep(0.1)
        writer.write(END + rest * 100)
        answers = await asyncio.wait_for(reader.read(), 30)
        assert answers.count(b"HTTP/1.1") <= 2
        assert (await call(server.port, "POST", "/echo", {})).status == 200


@pytest.mark.parametrize("path", [b"/hang", b"/echo"])
async def test_an_answer_to_http_1_0_is_not_chunked(path: bytes) -> None:
    async with probed() as server:
        reader, writer = await connect(server.port)
        raw = HEAD.replace(b"/echo", path).replace(b"HTTP/1.1", b"HTTP/1.0")
        writer.write(raw + b"content-length: 2\r\n\r\n{}")
        if path == b"/hang":
            async with asyncio.timeout(30):
                head, body = (
                    await reader.readuntil(b"\r\n\r\n"),
                    await reader.readexactly(len(b"data: 0\n\n")),
                )
            assert (b"transfer-encoding" in head.lower(), body) == (False, b"data: 0\n\n")
        else:
            answer = await asyncio.wait_for(reader.read(), 30)
            assert answer.endswith(b"\r\n\r\n{}")


async def test_a_client_that_still_sends_sees_the_error() -> None:
    async def refuse(request: Any) -> Any:
        await anext(request.stream())
        raise QueueFullError("full")

    async with served(handlers={"/refuse": refuse}, max_body_bytes=2**26, listens=True) as server:
        reader, writer = await connect(server.port)
        writer.write(b"POST /refuse HTTP/1.1\r\nhost: localhost\r\ncontent-length: 30000000\r\n\r\n")
        for _ in range(30):
            writer.write(b"a" * 1_000_000)
            await writer.drain()
            await asyncio.sleep(0.02)
        assert (await asyncio.wait_for(read_answer(reader), 30)).status == 429
