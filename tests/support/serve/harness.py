"""A running engine process (fake device, everything else real) and a client."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from collections.abc import AsyncIterator, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from chorale.client.admission import NO_LIMITS
from chorale.client.base import EngineInfo, EngineStatus
from chorale.client.remote import ClientLimits, RemoteClient
from chorale.config.engine import ServerConfig
from chorale.config.seeds import choice_seed
from chorale.engine.types import GenerateRequest, SamplingSpec, TokenChunk
from chorale.serve.bootstrap import EngineStart, make_directory
from chorale.serve.engine_monitor import EngineMonitor
from chorale.serve.watch import WatchLimits
from tests.support import ROOT
from tests.support.event_loop import until
from tests.support.serve.fake_engine import LIMITS, MODEL, Behaviour

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


@dataclass
class Rig:
    """A monitor that runs the engine, and one client."""

    directory: Path
    monitor: EngineMonitor
    client: RemoteClient
    running: asyncio.Task[int]
    told: list[tuple[EngineStatus, EngineInfo | None]] = field(default_factory=list)

    async def ready(self) -> None:
        """Wait until both the client and the monitor know that the engine is ready."""
        await until(lambda: self.client.status.state == "ready", "the client hears that the engine is ready")
        await until(lambda: self.told and self.told[-1][0].state == "ready", "the monitor hears it too")

    @property
    def engine_pid(self) -> int:
        assert self.monitor.pid is not None
        return self.monitor.pid

    async def engine_is_empty(self) -> float:
        """Wait until the engine has no request. Returns the seconds it took."""
        return await until(
            lambda: self.client.stats.num_running == 0 and self.client.stats.num_waiting == 0,
            "no request left in the engine",
        )


@contextlib.asynccontextmanager
async def rig(
    behaviour: Behaviour | None = None,
    *,
    watch: WatchLimits | None = None,
    client: ClientLimits | None = None,
    client_timeout: float = 10.0,
    queue: ServerConfig = NO_LIMITS,
    wait: bool = True,
) -> AsyncIterator[Rig]:
    """Start an engine process under a monitor and connect a client; end both after the block."""
    folder = make_directory()
    directory = folder.path
    told: list[tuple[EngineStatus, EngineInfo | None]] = []
    start = EngineStart(
        directory=str(directory),
        config=(behaviour or Behaviour()).encode(),
        parent_pid=os.getpid(),
        client_timeout=client_timeout,
    )
    monitor = EngineMonitor(
        start, command=FAKE_ENGINE, limits=watch, on_status=lambda *update: told.append(update)
    )
    remote = RemoteClient(directory, limits=client, queue=queue)
    remote.start()
    made = Rig(directory, monitor, remote, asyncio.ensure_future(monitor.run()), told)
    try:
        if wait:
            await made.ready()
        yield made
    finally:
        await remote.close()
        monitor.stop()
        await made.running
        folder.remove()
