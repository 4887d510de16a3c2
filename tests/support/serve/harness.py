"""Running engine processes (fake device, everything else real), and one client for all of them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from chorale.client.admission import NO_LIMITS
from chorale.client.base import EngineInfo, EngineStatus
from chorale.client.fleet.fixed_members import FixedFleet
from chorale.client.fleet.fleet import FleetClient
from chorale.client.fleet.members import Member
from chorale.client.remote import ClientLimits, RemoteClient
from chorale.config.engine import ServerConfig
from chorale.config.seeds import choice_seed
from chorale.engine.types import GenerateRequest, SamplingSpec, TokenChunk
from chorale.serve.bootstrap import EngineStart, make_directory, replicate
from chorale.serve.engine_monitor import EngineMonitor
from chorale.serve.watch import WatchLimits
from tests.support import ROOT
from tests.support.event_loop import until
from tests.support.serve.fake_engine import LIMITS, MODEL, Behaviour

Client = TypeVar("Client", bound=RemoteClient | FleetClient)
FAKE_ENGINE = (sys.executable, str(ROOT / "tests" / "support" / "serve" / "fake_engine.py"))


def run(test: Coroutine[Any, Any, None], loop: str = "asyncio") -> None:
    """Run a test coroutine, on the named event loop."""
    factory = None
    if loop == "uvloop":
        import uvloop

        factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(asyncio.wait_for(test, 280))


def request(
    name: str, num_tokens: int = 20, *, prompt: list[int] | None = None, n: int = 1, seed: int = 7
) -> GenerateRequest:
    sampling = SamplingSpec(n=n, max_tokens=num_tokens, seed=seed, ignore_eos=True)
    ids = prompt if prompt is not None else list(range(1, 40))
    return GenerateRequest(request_id=name, prompt_token_ids=ids, sampling=sampling, arrival_time=time.time())


def expected(asked: GenerateRequest, index: int = 0) -> list[int]:
    """Returns the tokens that the fake model gives this request alone."""
    assert asked.sampling.seed is not None
    seed = choice_seed(asked.sampling.seed, index)
    return MODEL.generate(asked.prompt_token_ids, asked.sampling, seed, LIMITS.max_model_len)[0]


async def collect(stream: AsyncIterator[list[TokenChunk]]) -> dict[int, tuple[list[int], str | None]]:
    """Returns for each choice its tokens and its finish reason."""
    found: dict[int, tuple[list[int], str | None]] = {}
    async for chunks in stream:
        for chunk in chunks:
            tokens, _ = found.get(chunk.index, ([], None))
            found[chunk.index] = (tokens + chunk.token_ids, chunk.finish_reason)
    return found


@contextlib.asynccontextmanager
async def started(client: Client) -> AsyncIterator[Client]:
    client.start()
    try:
        yield client
    finally:
        await client.close()


@dataclass
class Engine:
    """An engine process under its monitor, and what the monitor has told."""

    directory: Path
    monitor: EngineMonitor
    running: asyncio.Task[int]
    told: list[tuple[EngineStatus, EngineInfo | None]]

    @property
    def pid(self) -> int:
        assert self.monitor.pid is not None
        return self.monitor.pid

    def kill(self, number: signal.Signals = signal.SIGKILL) -> int:
        """Returns the id of the process that got the signal."""
        pid = self.pid
        os.kill(pid, number)
        return pid


@contextlib.asynccontextmanager
async def engines(
    count: int = 1,
    behaviour: Behaviour | None = None,
    *,
    command: Sequence[str] = FAKE_ENGINE,
    own_secrets: bool = False,
    watch: WatchLimits | None = None,
    **start: Any,
) -> AsyncIterator[list[Engine]]:
    """Runs replicas until the end of the block. ``own_secrets``: each draws its own secret, as engines of
    different servers do; ``start``: fields of ``EngineStart``."""
    folder = make_directory()
    config = (behaviour or Behaviour()).encode()
    first = EngineStart(directory=str(folder.path), config=config, parent_pid=os.getpid(), **start)
    made = []
    for each in replicate(first, count):
        if own_secrets:
            each = msgspec.structs.replace(each, prefix_secret=b"")
        told: list[tuple[EngineStatus, EngineInfo | None]] = []
        monitor = EngineMonitor(
            each, command=command, limits=watch, on_status=lambda *update, told=told: told.append(update)
        )
        made.append(Engine(Path(each.directory), monitor, asyncio.ensure_future(monitor.run()), told))
    try:
        yield made
    finally:
        for engine in made:
            engine.monitor.stop()
        await asyncio.gather(*(engine.running for engine in made))
        folder.remove()


@dataclass
class Rig(Engine):
    """An engine and a client."""

    client: RemoteClient

    async def ready(self) -> None:
        """Wait until both the client and the monitor know that the engine is ready."""
        await until(lambda: self.client.status.state == "ready", "the client hears that the engine is ready")
        await until(lambda: self.told and self.told[-1][0].state == "ready", "the monitor hears it too")

    async def is_empty(self) -> float:
        """Wait until the engine has no request. Returns the seconds it took."""
        return await until(
            lambda: self.client.stats.num_running == 0 and self.client.stats.num_waiting == 0,
            "no request left in the engine",
        )


@contextlib.asynccontextmanager
async def rig(
    behaviour: Behaviour | None = None,
    *,
    client: ClientLimits | None = None,
    queue: ServerConfig = NO_LIMITS,
    wait: bool = True,
    **options: Any,
) -> AsyncIterator[Rig]:
    """``options``: those of ``engines``."""
    async with (
        engines(1, behaviour, **options) as [engine],
        started(RemoteClient(engine.directory, limits=client, queue=queue)) as remote,
    ):
        made = Rig(**vars(engine), client=remote)
        if wait:
            await made.ready()
        yield made


@dataclass
class ReplicaRig:
    """Several engines and one client for all of them."""

    engines: list[Engine]
    client: FixedFleet

    @property
    def members(self) -> list[Member]:
        """Returns the engines in the order of their index, as the client sees them."""
        return list(self.client.members.by_name.values())

    async def ready(self) -> None:
        await until(lambda: all(each.is_followed for each in self.members), "every replica is followed")

    async def ask(self, request: GenerateRequest) -> tuple[int, int, list[int]]:
        """Returns (engine that answered, number of cached prompt tokens, output tokens)."""
        stream = self.client.submit(request)
        chunks = [chunk async for part in stream for chunk in part]
        assert not [chunk.error for chunk in chunks if chunk.error]
        tokens = [token for chunk in chunks for token in chunk.token_ids]
        return stream.engine, chunks[0].num_cached_tokens, tokens

    async def idle(self) -> None:
        await until(
            lambda: all(
                each.follower.backlog().num_rows == each.follower.backlog().tokens_left == 0
                for each in self.members
            ),
            "every engine is idle, and its followers know",
        )


@contextlib.asynccontextmanager
async def replica_rig(
    count: int = 2, behaviour: Behaviour | None = None, *, own_secrets: bool = False, **client: Any
) -> AsyncIterator[ReplicaRig]:
    """``client``: options of the client."""
    async with (
        engines(count, behaviour, own_secrets=own_secrets) as replicas,
        started(FixedFleet([each.directory for each in replicas], **client)) as fleet,
    ):
        made = ReplicaRig(replicas, fleet)
        await made.ready()
        yield made
