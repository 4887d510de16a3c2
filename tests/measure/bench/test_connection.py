"""The load generator's HTTP client: events do not depend on how the bytes arrive."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chorale.measure.bench.connection import EventConnection, Target
from chorale.measure.bench.load import Load, LoadRequest, Outcome, Pace
from chorale.measure.bench.load_processes import run_load, share

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
EVENTS = [b'{"choices":[{"text":"a"}]}', b'{"choices":[{"text":"b\\n"}]}', b"[DONE]"]


def chunked(data: bytes, sizes: list[int]) -> bytes:
    out, rest = b"", data
    for size in sizes:
        chunk, rest = rest[:size], rest[size:]
        if chunk:
            out += b"%x\r\n%s\r\n" % (len(chunk), chunk)
    if rest:
        out += b"%x\r\n%s\r\n" % (len(rest), rest)
    return out + b"0\r\n\r\n"


@given(st.lists(st.integers(1, 30), max_size=8), st.lists(st.integers(1, 40), max_size=30))
@settings(max_examples=60, deadline=None)
def test_events_do_not_depend_on_how_bytes_arrive(chunks: list[int], cuts: list[int]) -> None:
    body = b": keep-alive\n\n" + b"".join(b"data: " + event + b"\n\n" for event in EVENTS)
    wire = HEAD + chunked(body, chunks)
    connection = EventConnection()
    for cut in cuts:
        connection.data_received(wire[:cut])
        wire = wire[cut:]
    connection.data_received(wire)
    assert [event for event, _ in connection.on_event] == EVENTS
    assert connection.reply.done
    assert connection.reusable


def test_a_body_with_a_content_length_is_read_in_full() -> None:
    connection = EventConnection()
    connection.data_received(b"HTTP/1.1 404 Not Found\r\nContent-Length: 5\r\n\r\nhel")
    assert not connection.reply.done
    connection.data_received(b"lo")
    assert (connection.reply.status, bytes(connection.reply.body), connection.reply.done) == (
        404,
        b"hello",
        True,
    )


Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


async def serve(handler: Handler) -> tuple[asyncio.Server, Target]:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            # The end of the loop cancels a waiting handler. asyncio before 3.12 reports that as an error.
            with contextlib.suppress(asyncio.CancelledError):
                await handler(reader, writer)
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    return server, Target(f"http://127.0.0.1:{port}/v1/completions", (("x-test", "1"),))


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Sends ``max_tokens`` pieces, 10 ms apart, for every request of the connection."""
    while True:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.IncompleteReadError:
            return
        assert b"x-test: 1" in head
        length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
        body = json.loads(await reader.readexactly(length))
        writer.write(HEAD)
        for number in range(body["max_tokens"]):
            event = b'data: {"choices":[{"text":"t%d"}]}\n\n' % number
            writer.write(b"%x\r\n%s\r\n" % (len(event), event))
            await asyncio.sleep(0.01)
        usage = b'data: {"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":6}}\n\ndata: [DONE]\n\n'
        writer.write(b"%x\r\n%s\r\n0\r\n\r\n" % (len(usage), usage))


async def load(handler: Handler, requests: list[LoadRequest], pace: Pace) -> list[Outcome]:
    server, target = await serve(handler)
    async with server:
        return await Load(target, pace).run(requests)


def test_outcomes_have_the_times_and_usage_of_the_response() -> None:
    requests = [LoadRequest(json.dumps({"max_tokens": 3}), 7)] * 6
    outcomes = asyncio.run(load(answer, requests, Pace(concurrency=2)))
    assert [each.error for each in outcomes] == [""] * 6
    for each in outcomes:
        assert (each.prompt_tokens, each.output_tokens, len(each.itl)) == (7, 6, 2)  # tokens of the usage
        assert each.latency == pytest.approx(each.ttft + sum(each.itl))
        assert each.tpot == pytest.approx((each.latency - each.ttft) / 5)
        assert min(each.itl) > 0
    running = [sum(a.start <= b.start < a.start + a.latency for a in outcomes) for b in outcomes]
    assert max(running) == 2


async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readuntil(b"\r\n\r\n")
    text = b'{"error":{"message":"no such model"}}'
    writer.write(b"HTTP/1.1 404 Not Found\r\ncontent-length: %d\r\n\r\n%s" % (len(text), text))


async def vanish(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readuntil(b"\r\n\r\n")
    writer.write(HEAD + b"5\r\ndata:")
    await writer.drain()


async def fail_later(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Sends two pieces and then an error, like a server whose engine dies."""
    await reader.readuntil(b"\r\n\r\n")
    pieces = b"".join(b'data: {"choices":[{"text":"t"}]}\n\n' for _ in range(2))
    writer.write(
        HEAD + chunked(pieces + b'data: {"error":{"message":"the engine died"}}\n\ndata: [DONE]\n\n', [])
    )


async def fail_with_a_string(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readuntil(b"\r\n\r\n")
    writer.write(HEAD + chunked(b'data: {"error":"overloaded"}\n\ndata: [DONE]\n\n', []))


async def send_a_list(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readuntil(b"\r\n\r\n")
    writer.write(HEAD + chunked(b"data: []\n\ndata: [DONE]\n\n", []))


@pytest.mark.parametrize(
    ("handler", "words"),
    [
        (fail_with_a_string, "overloaded"),
        (send_a_list, "not a JSON object"),
        (refuse, "HTTP 404"),
        (vanish, "closed the connection"),
        (fail_later, "the engine died"),
    ],
)
def test_a_fault_of_the_server_is_the_error_of_the_outcome(handler: Handler, words: str) -> None:
    outcomes = asyncio.run(load(handler, [LoadRequest("{}", 1)] * 2, Pace()))
    assert all(words in each.error for each in outcomes), [each.error for each in outcomes]


def test_an_unreachable_server_is_the_error_of_the_outcome() -> None:
    outcomes = asyncio.run(Load(Target("http://127.0.0.1:9/v1"), Pace()).run([LoadRequest("{}", 1)]))
    assert "Error" in outcomes[0].error


@pytest.mark.parametrize("host", ["127.0.0.1:8000", "[::1]:8000", "example.com"])
def test_the_host_header_is_the_host_and_port_of_the_url(host: str) -> None:
    assert Target(f"https://user:word@{host}/v1").authority == host


def test_starts_follow_the_rate() -> None:
    starts = list(Pace(rate=50.0, seed=3).starts(4000))
    assert starts[0] == 0.0
    assert starts == sorted(starts)
    assert 4000 / starts[-1] == pytest.approx(50, rel=0.1)
    assert list(Pace(rate=50.0, seed=3).starts(4000)) == starts
    assert list(Pace().starts(3)) == [0.0] * 3


def test_processes_share_the_rate_and_the_concurrency() -> None:
    paces = [share(Pace(rate=9.0, concurrency=10, seed=5), number, 3) for number in range(3)]
    assert [pace.concurrency for pace in paces] == [4, 3, 3]
    assert [pace.rate for pace in paces] == [3.0] * 3
    assert len({pace.seed for pace in paces}) == 3


def test_several_processes_return_all_outcomes() -> None:
    async def main() -> tuple[list[Outcome], float]:
        server, target = await serve(answer)
        requests = [LoadRequest(json.dumps({"max_tokens": 2}), 7)] * 9
        async with server:
            return await asyncio.to_thread(run_load, target, Pace(concurrency=4), requests, 2, lambda _: None)

    outcomes, seconds = asyncio.run(main())
    assert len(outcomes) == 9
    assert all(not each.error for each in outcomes)
    assert 0 < seconds < 60
