"""Direct writes of a chat stream, from the engine's client to the socket without the generators."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

import pytest
import uvloop

from chorale.api.chat.chunks import ChunkWriter
from chorale.api.http.stream import EventStream
from chorale.api.http.turns import Turns
from chorale.engine.types import GenerateRequest
from chorale.testing.scripted_client import Script, ScriptedClient
from tests.support.raw_http import connect
from tests.support.server import VOCAB, Server, served

TEXT = "The tide turned before dawn, and the harbour lights went out. " * 40
TOKENS = (200005, 17196, 200008, *VOCAB.encode(TEXT), 200002)


def play(request: GenerateRequest, index: int) -> Script:
    return Script(TOKENS)


async def ask(server: Server, pause: float = 0.0, **fields: Any) -> bytes:
    """Returns the body of a stream. Waits ``pause`` seconds before it reads."""
    reader, writer = await connect(server.port)
    body = json.dumps({"messages": [{"role": "user", "content": "hi"}], "stream": True, **fields}).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    writer.write(f"{head}connection: close\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body)
    await asyncio.sleep(pause)
    answer = await reader.read(-1)
    writer.close()
    return answer.partition(b"\r\n\r\n")[2]


def events(body: bytes) -> list[dict[str, Any]]:
    """Returns the chunks without ids and times. Asserts that the chunked encoding is valid."""
    data, rest = b"", body
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        data, after = data + rest[: int(size, 16)], rest[int(size, 16) :]
        assert after.startswith(b"\r\n")
        rest = after[2:]
    assert data.endswith(b"data: [DONE]\n\n")
    found = [json.loads(line[6:]) for line in data.split(b"\n\n") if line.startswith(b"data: {")]
    return [{k: v for k, v in each.items() if k not in ("id", "created")} for each in found]


@pytest.mark.parametrize("fields", [{}, {"logprobs": True}, {"stop": ["lights went out. The"]}, {"n": 2}])
async def test_direct_writes_send_the_same_events_as_the_generators(
    monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any]
) -> None:
    num_direct = 0
    write = EventStream.write

    def counted(self: EventStream, batch: Any) -> None:
        nonlocal num_direct
        num_direct += 1
        write(self, batch)

    monkeypatch.setattr(EventStream, "write", counted)
    async with served(ScriptedClient(play), listens=True) as server:
        first = events(await ask(server, **fields))
        monkeypatch.setattr(EventStream, "is_open", False)
        direct, woken = [first, events(await ask(server, **fields))]
    assert direct == woken
    assert (num_direct > 5) == ("n" not in fields)


async def test_a_client_that_pauses_reading_gets_everything() -> None:
    tokens = (*TOKENS[:3], *VOCAB.encode(TEXT * 20), 200002)
    async with served(ScriptedClient(lambda request, index: Script(tokens)), listens=True) as server:
        found = events(await ask(server, pause=1.0))
        text = "".join(each["choices"][0]["delta"].get("content", "") for each in found)
        assert text == TEXT * 20


async def test_a_fault_ends_only_its_own_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    feed, faulty = ChunkWriter.feed, list[ChunkWriter]()

    def fails(self: ChunkWriter, batch: Any) -> bytes:
        faulty.append(self)
        if self is faulty[0] and faulty.count(self) == 20:
            raise ZeroDivisionError
        return feed(self, batch)

    monkeypatch.setattr(ChunkWriter, "feed", fails)
    async with served(ScriptedClient(play), listens=True) as server:
        broken = asyncio.create_task(ask(server))
        while not faulty:
            await asyncio.sleep(0)
        whole = await ask(server)
        assert events(whole)
        assert not (await broken).endswith(b"0\r\n\r\n")


def test_a_closed_connection_does_not_block_the_chunks_of_others() -> None:
    async def both_ends() -> tuple[bytes, bytes]:
        turns, ends = Turns(), [socket.socketpair() for _ in range(2)]
        loop, readers = asyncio.get_running_loop(), [reader for reader, _ in ends]
        made = [await loop.create_connection(asyncio.Protocol, sock=writer) for _, writer in ends]
        made[0][0].abort()
        await asyncio.sleep(0.05)
        for transport, _ in made:
            turns.send(transport, b"1")
            turns.send(transport, b"2")
        await asyncio.sleep(0.05)
        made[1][0].close()
        received = [await asyncio.to_thread(reader.recv, 10) for reader in readers]
        for reader in readers:
            reader.close()
        return received[0], received[1]

    assert uvloop.run(both_ends()) == (b"", b"12")
