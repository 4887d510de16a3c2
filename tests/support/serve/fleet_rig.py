"""Engines behind TCP (fake device, everything else real), and one fleet client for all of them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from typing import Any

from chorale.client.fleet.fleet import FleetClient
from chorale.client.fleet.members import Ticket
from chorale.serve.fleet.engine_host import EngineHost
from tests.support.serve.fake_engine import Behaviour
from tests.support.serve.harness import FAKE_ENGINE, until


class LocalAssigner:
    """Assigns a request to the member that the fleet ranks first; counts the requests of each member."""

    def __init__(self, fleet: FleetClient) -> None:
        self.fleet = fleet
        self.names: list[str] = []
        self.given: list[tuple[str, str]] = []  # (request, member)
        self.running: dict[str, str] = {}
        self.holds = False  # True: nothing is assigned

    async def assign(self, ticket: Ticket) -> str:
        while self.holds or not (ranked := self.fleet.members.rank(ticket, self.names)):
            await asyncio.sleep(0.005)
        assert ticket.name not in self.running
        self.running[ticket.name] = ranked[0]
        self.given.append((ticket.name, ranked[0]))
        return ranked[0]

    def ended(self, ticket: Ticket) -> None:
        del self.running[ticket.name]


class FleetRig:
    def __init__(self, behaviour: Behaviour, **client: Any) -> None:
        self._behaviour = behaviour
        self.hosts: dict[str, EngineHost] = {}
        self.left: set[str] = set()
        self.client = FleetClient(LocalAssigner, **client)
        assert isinstance(self.client.assigner, LocalAssigner)
        self.assigner = self.client.assigner

    def add(self, *names: str) -> None:
        for name in names:
            host = EngineHost(
                self._behaviour.encode(), "127.0.0.1", prefix_secret=b"fleet", command=FAKE_ENGINE
            )
            host.start()
            self.hosts[name] = host
        self.announce()

    def announce(self, *without: str) -> None:
        """``without``: engines that leave for good."""
        self.left.update(without)
        names = [name for name in self.hosts if name not in self.left]
        self.assigner.names = names
        self.client.set_members({name: self.hosts[name].address for name in names})

    def kill(self, name: str) -> None:
        pid = self.hosts[name].monitor.pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)

    async def ready(self) -> None:
        members = self.client.members.by_name
        await until(lambda: all(m.is_followed for m in members.values()), "every engine is followed")


@contextlib.asynccontextmanager
async def fleet_rig(
    count: int = 2, behaviour: Behaviour | None = None, **client: Any
) -> AsyncIterator[FleetRig]:
    rig = FleetRig(behaviour or Behaviour(step_seconds=0.005), **client)
    rig.client.start()
    try:
        rig.add(*(f"r{index}" for index in range(count)))
        await rig.ready()
        yield rig
    finally:
        await rig.client.close()
        await asyncio.gather(*(asyncio.to_thread(host.stop) for host in rig.hosts.values()))
