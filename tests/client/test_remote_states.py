"""RemoteClient against scripted engine sockets: messages that a real engine sends only in rare races."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
import zmq

from chorale.client.base import EngineInfo, EngineStatus
from chorale.client.remote import ClientLimits, RemoteClient
from chorale.client.wire.messages import (
    Abort,
    CheckGrammar,
    ClientExpired,
    EngineFailed,
    FromEngine,
    GrammarChecked,
    Heartbeat,
    Register,
    StepMessage,
    Submit,
    decode_to_engine,
    encode,
    engine_address,
    heartbeat_address,
)
from chorale.engine.types import EngineStats, StepOutputs, TokenChunk
from chorale.errors import EngineDeadError
from chorale.serve.bootstrap import make_directory
from tests.support.serve.harness import collect, request, run, until

INFO = EngineInfo(model="fake", max_model_len=1000, max_num_seqs=4)


class Wire:
    """The engine's two sockets, and the client at their other end."""

    def __init__(self, directory: Any, limits: ClientLimits) -> None:
        self._context = zmq.Context()
        self._beats = self._context.socket(zmq.PUB)
        self._router = self._context.socket(zmq.ROUTER)
        self._beats.bind(heartbeat_address(directory))
        self._router.bind(engine_address(directory))
        self._identity = b""
        self.received: list[Any] = []
        self.told: list[EngineStatus] = []
        self.client = RemoteClient(directory, limits=limits, on_status=self.told.append)

    def beat(self, engine_id: str) -> None:
        self._beats.send(encode(Heartbeat(engine_id=engine_id, pid=os.getpid(), state="ready", info=INFO)))

    def say(self, message: FromEngine) -> None:
        self._router.send_multipart([self._identity, encode(message)])

    def step(self, engine_id: str, request_id: str, token: int, finish: Any = None) -> None:
        chunk = TokenChunk(request_id, 0, [token], finish)
        self.say(StepMessage(engine_id, StepOutputs([chunk], EngineStats())))

    def read(self) -> list[Any]:
        """Return all messages that the client has sent; ``say`` then answers on its newest connection."""
        with contextlib.suppress(zmq.Again):
            while True:
                self._identity, data = self._router.recv_multipart(zmq.NOBLOCK)
                self.received.append(decode_to_engine(data))
        return self.received

    async def until_received(self, kind: type, count: int = 1) -> Any:
        def found() -> list[Any]:
            return [message for message in self.read() if isinstance(message, kind)]

        await until(lambda: len(found()) >= count, f"the client sends {kind.__name__}")
        return found()[-1]

    async def attach(self, engine_id: str, count: int = 1) -> None:
        """Beat until the client has connected for the ``count``-th time."""

        def connected() -> bool:
            self.beat(engine_id)
            return sum(isinstance(message, Register) for message in self.read()) >= count

        await until(connected, f"the client connects to {engine_id}")
        await until(lambda: self.client.status.state == "ready", "the client is ready")

    def close(self) -> None:
        self._router.close(0)
        self._beats.close(0)
        self._context.term()


@contextlib.asynccontextmanager
async def wire(**limits: float) -> AsyncIterator[Wire]:
    folder = make_directory()
    made = Wire(folder.path, ClientLimits(**{"engine_silence": 60.0, **limits}))  # type: ignore[arg-type]
    made.client.start()
    try:
        yield made
    finally:
        await made.client.close()
        made.close()
        folder.remove()


async def settle(rounds: int = 20) -> None:
    """Wait until messages that must have no effect have arrived."""
    for _ in range(rounds):
        await asyncio.sleep(0.01)


async def test_heartbeats_of_an_engine_that_reported_its_failure_are_ignored() -> None:
    """The process of a failed engine sends heartbeats until it has ended."""
    async with wire() as w:
        await w.attach("one")
        w.say(EngineFailed("one", "the device failed"))
        await until(lambda: w.client.status.state == "dead", "the failure arrives")
        for _ in range(20):
            w.beat("one")
            await asyncio.sleep(0.01)
        assert w.client.status.state == "dead"
        with pytest.raises(EngineDeadError, match="the device failed"):
            w.client.submit(request("r"))
        await w.attach("two", count=2)
        assert w.client.submit(request("r")).num_unfinished == 1


async def test_each_grammar_check_gets_its_answer_or_an_error_when_the_engine_fails() -> None:
    async with wire() as w:
        await w.attach("one")
        checks = [asyncio.ensure_future(w.client.check_grammar(text)) for text in ("a", "b", "c")]
        await w.until_received(CheckGrammar, 3)
        asked = {each.grammar: each.number for each in w.received if isinstance(each, CheckGrammar)}
        w.say(GrammarChecked("one", asked["b"], "no such rule"))
        w.say(GrammarChecked("one", asked["a"], None))
        assert await asyncio.gather(*checks[:2]) == [None, "no such rule"]
        w.say(EngineFailed("one", "the device failed"))
        with pytest.raises(EngineDeadError):
            await checks[2]
        await w.attach("two", count=2)
        left = asyncio.ensure_future(w.client.check_grammar("d"))
        await w.until_received(CheckGrammar, 4)
        await w.client.close()
        with pytest.raises(EngineDeadError):
            await left


async def test_messages_of_an_earlier_engine_are_ignored() -> None:
    async with wire() as w:
        await w.attach("one")
        await w.attach("two", count=2)
        stream = w.client.submit(request("r"))
        await w.until_received(Submit)
        w.step("one", "r", 5)
        w.say(EngineFailed("one", "too late"))
        w.say(ClientExpired("one", "too late"))
        await settle()
        assert w.client.status.state == "ready"
        w.step("two", "r", 7, "stop")
        assert await collect(stream) == {0: ([7], "stop")}


async def test_streams_that_the_engine_dropped_are_aborted_there_too() -> None:
    """A request may have been sent before ``ClientExpired`` arrived: it would run without a reader."""
    async with wire() as w:
        await w.attach("one")
        stream = w.client.submit(request("r"))
        assert (await w.until_received(Submit)).request.request_id == "r"
        w.say(ClientExpired("one", "the client was silent"))
        with pytest.raises(EngineDeadError, match="silent"):
            await collect(stream)
        assert (await w.until_received(Abort)).request_ids == ["r"]


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_a_blocked_event_loop_does_not_count_a_live_engine_as_dead(loop: str) -> None:
    """uvloop runs timers before it reads sockets: after a blocking reader, a heartbeat is still unread."""

    async def scene() -> None:
        async with wire(ping_interval=0.05, engine_silence=1.0) as w:
            await w.attach("one")
            stream = w.client.submit(request("r"))
            ours, theirs = socket.socketpair()

            def pause() -> None:
                ours.recv(1)
                time.sleep(0.6)
                w.beat("one")
                time.sleep(0.6)

            asyncio.get_running_loop().add_reader(ours, pause)
            with ours, theirs:
                w.beat("one")
                theirs.send(b"x")
                await asyncio.sleep(0.1)
                asyncio.get_running_loop().remove_reader(ours)
            assert [status.state for status in w.told] == ["ready"]
            assert stream.num_unfinished == 1

    run(scene(), loop)


async def test_a_failed_heartbeat_ends_all_streams_and_clears_the_gauges() -> None:
    async with wire() as w:
        await w.attach("one")
        stream = w.client.submit(request("r"))
        submitted = await w.until_received(Submit)
        stats = EngineStats(num_running=1, kv_blocks_used=3, generation_tokens=7)
        w.say(StepMessage("one", StepOutputs([TokenChunk("r", 0, [5])], stats)))
        await until(lambda: w.client.stats.num_running == 1, "the step arrives")
        assert submitted.request.request_id == "r"
        beat = Heartbeat(engine_id="", pid=0, state="failed", message="no such device")
        for _ in range(3):
            w._beats.send(encode(beat))
        await until(lambda: w.client.status.state == "failed", "the client knows it")
        assert w.client.status.message == "no such device"
        stats = w.client.stats
        assert (stats.num_running, stats.kv_blocks_used, stats.generation_tokens) == (0, 0, 7)
        with pytest.raises(EngineDeadError, match="no such device"):
            await collect(stream)
        with pytest.raises(EngineDeadError, match="no such device"):
            w.client.submit(request("s"))
