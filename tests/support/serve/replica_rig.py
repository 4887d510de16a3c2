"""Several engine processes (fake device, everything else real), and one client for all of them."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import msgspec

from chorale.client.fleet.fixed_members import FixedFleet
from chorale.client.fleet.members import Member
from chorale.config.kv_events import KvEventsConfig
from chorale.engine.types import GenerateRequest
from chorale.serve.bootstrap import EngineStart, make_directory, replicate
from chorale.serve.engine_monitor import EngineMonitor
from tests.support.serve.fake_engine import Behaviour
from tests.support.serve.harness import FAKE_ENGINE, until


@dataclass
class ReplicaRig:
    client: FixedFleet
    monitors: list[EngineMonitor]
    directories: list[str]

    @property
    def members(self) -> list[Member]:
        return members_of(self.client)

    async def ready(self) -> None:
        await until(lambda: all(each.is_followed for each in self.members), "every replica is followed")

    def kill(self, index: int) -> None:
        pid = self.monitors[index].pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)

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


def members_of(client: FixedFleet) -> list[Member]:
    """Returns the engines in the order of their index."""
    return list(client.members.by_name.values())


@contextlib.asynccontextmanager
async def replica_rig(
    count: int = 2,
    behaviour: Behaviour | None = None,
    *,
    own_secrets: bool = False,
    kv_events: KvEventsConfig | None = None,
    **client: Any,
) -> AsyncIterator[ReplicaRig]:
    """``own_secrets``: each engine draws its own secret, as engines of different servers do."""
    folder = make_directory()
    config = dataclasses.replace((behaviour or Behaviour()).encode(), kv_events_config=kv_events)
    start = EngineStart(directory=str(folder.path), config=config, parent_pid=os.getpid())
    starts = replicate(start, count)
    if own_secrets:
        starts = tuple(msgspec.structs.replace(each, prefix_secret=b"") for each in starts)
    monitors = [EngineMonitor(each, command=FAKE_ENGINE) for each in starts]
    directories = [each.directory for each in starts]
    replicas = FixedFleet(directories, **client)
    replicas.start()
    running = [asyncio.ensure_future(monitor.run()) for monitor in monitors]
    made = ReplicaRig(replicas, monitors, directories)
    try:
        await made.ready()
        yield made
    finally:
        await replicas.close()
        for monitor in monitors:
            monitor.stop()
        await asyncio.gather(*running)
        folder.remove()
