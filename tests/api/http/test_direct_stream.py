"""The fast path of a chat stream, from the engine's client to the socket without the generators."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

import pytest
import uvloop

from chorale.api.chat.chunks import ChunkWriter
from chorale.api.http.turns import Turns
from chorale.engine.types import GenerateRequest, TokenChunk
from chorale.turns.choice.runaway import LOOP_TOKENS
from chorale.turns.direct import Direct, Outlet
from tests.support.engine.scripted_client import Script, ScriptedClient
from tests.support.raw_http import call
from tests.support.scripted import fold_chat, without_ids
from tests.support.server import VOCAB, Server, served

TEXT = "The tide turned before dawn, and the harbour lights went out. " * 40
TOKENS = (200005, 17196, 200008, *VOCAB.encode(TEXT), 200002)
SEVERAL = VOCAB.encode_with_special(
    "<|channel|>analysis<|message|>The moon \U0001f319 pulls.<|end|>"
    "<|start|>assistant<|channel|>analysis<|message|>\n\nAnd the sun.<|end|>"
    "<|start|>assistant<|channel|>commentary<|message|>Let me look.<|end|>"
    "<|start|>assistant<|channel|>final<|message|>Twice a day, at the \u6f6e.<|end|>"
    '<|start|>assistant<|channel|>commentary to=functions.tide<|message|>{"day": "Monday"}<|call|>'
)
CHAT, MESSAGES = "/v1/chat/completions", [{"role": "user", "content": "hi"}]
TIDE = {"type": "function", "function": {"name": "tide", "parameters": {"type": "object"}}}


def play(request: GenerateRequest, index: int) -> Script:
    return Script(TOKENS)


async def ask(server: Server, **fields: Any) -> bytes:
    body = {"messages": MESSAGES, "stream": True, **fields}
    return (await call(server.port, "POST", CHAT, body)).body


def events(body: bytes) -> list[dict[str, Any]]:
    """Returns the chunks without ids and times."""
    assert body.endswith(b"data: [DONE]\n\n")
    found = [json.loads(line[6:]) for line in body.split(b"\n\n") if line.startswith(b"data: {")]
    return [{k: v for k, v in each.items() if k not in ("id", "created")} for each in found]


@pytest.mark.parametrize(
    "fields",
    [
        {"stream_options": {"include_usage": True}},
        {"logprobs": True},
        {"stop": ["lights went out. The"]},
        {"n": 2},
    ],
)
async def test_direct_writes_send_the_same_events_as_the_generators(
    monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any]
) -> None:
    num_direct = count(monkeypatch)
    async with served(ScriptedClient(play), listens=True) as server:
        direct = events(await ask(server, **fields))
        monkeypatch.setattr(Direct, "read", lambda self, chunk: False)
        woken = events(await ask(server, **fields))
    assert direct == woken
    assert (sum(num_direct) > 5) == ("n" not in fields)


def count(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Returns a list that gets the number of tokens of each chunk that takes the fast path."""
    read, found = Direct.read, list[int]()

    def counted(self: Direct, chunk: TokenChunk) -> bool:
        is_read = read(self, chunk)
        found.extend([len(chunk.token_ids)] * is_read)
        return is_read

    monkeypatch.setattr(Direct, "read", counted)
    return found


@pytest.mark.parametrize("size", [1, 3])
async def test_every_kind_of_message_takes_the_fast_path(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    script = Script(SEVERAL, tokens_per_step=size)
    num_direct = count(monkeypatch)
    async with served(ScriptedClient(lambda request, index: script), listens=True) as server:
        direct = events(await ask(server, tools=[TIDE]))
        assert size in num_direct
        monkeypatch.setattr(Direct, "read", lambda self, chunk: False)
        woken = events(await ask(server, tools=[TIDE]))
    found = fold_chat(direct)[0]
    assert without_ids(found) == without_ids(fold_chat(woken)[0])
    assert found["reasoning"] == "The moon \U0001f319 pulls.\n\n\n\nAnd the sun."
    assert found["content"] == "Let me look.\n\nTwice a day, at the \u6f6e."
    assert json.loads(found["calls"][0]["arguments"]) == {"day": "Monday"}


async def test_reasoning_that_repeats_itself_is_cut_on_the_fast_path(monkeypatch: pytest.MonkeyPatch) -> None:
    def loop(request: GenerateRequest, index: int) -> Script:
        if len(client.requests) == 1:
            return Script((200005, 35644, 200008, *VOCAB.encode(" again") * 4000))
        return Script((*VOCAB.encode("Done."), 200002))

    client = ScriptedClient(loop)
    num_direct = count(monkeypatch)
    async with served(client, listens=True) as server:
        found = fold_chat(events(await ask(server)))[0]
    assert found["content"] == "Done."
    assert found["reasoning"].count("again") < LOOP_TOKENS + 600
    assert sum(num_direct) > LOOP_TOKENS / 2


def test_a_chunk_that_was_sent_ends_the_silence() -> None:
    sent: list[bytes] = []
    direct = Direct(Outlet(asyncio.WriteTransport(), lambda transport, chunk: sent.append(chunk)))
    direct.decode, direct.encode = lambda chunk: "text", lambda found: b"chunk"
    direct.is_idle = True
    assert direct.read(TokenChunk("request", 0, [1]))
    assert (sent, direct.is_idle) == ([b"chunk"], False)


async def test_a_client_that_pauses_reading_gets_everything() -> None:
    tokens = (*TOKENS[:3], *VOCAB.encode(TEXT * 20), 200002)
    async with served(ScriptedClient(lambda request, index: Script(tokens)), listens=True) as server:
        body = {"messages": MESSAGES, "stream": True}
        answer = await call(server.port, "POST", CHAT, body, pause=1.0)
        assert fold_chat(events(answer.body))[0]["content"] == TEXT * 20


async def test_a_fault_is_logged_and_ends_only_its_own_stream(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
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
        assert events(await ask(server))
        with pytest.raises(asyncio.IncompleteReadError):  # its end is missing
            await broken
    assert "ZeroDivisionError" in caplog.text


def test_a_closed_connection_does_not_block_the_chunks_of_others() -> None:
    async def both_ends() -> tuple[bytes, bytes]:
        turns, ends = Turns(), [socket.socketpair() for _ in range(2)]
        loop, readers = asyncio.get_running_loop(), [reader for reader, _ in ends]
        made = [await loop.create_connection(asyncio.Protocol, sock=writer) for _, writer in ends]
        made[0][0].abort()
        await asyncio.sleep(0.05)
        for transport, _ in made:
            outlet = turns.outlet(transport)
            outlet.send(transport, b"a")
            outlet.send(transport, b"b")
        await asyncio.sleep(0.05)
        made[1][0].close()
        received = [await asyncio.to_thread(reader.recv, 20) for reader in readers]
        for reader in readers:
            reader.close()
        return received[0], received[1]

    assert uvloop.run(both_ends()) == (b"", b"1\r\na\r\n1\r\nb\r\n")
