"""RayAssigner: lets Ray Serve assign requests to replicas, and tells the replica when a request ends."""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from chorale.client.fleet.fleet import FleetClient
from chorale.client.fleet.members import Ticket
from chorale.client.wire.messages import EngineAddress
from chorale.errors import EngineDeadError
from chorale.machine.tasks import end_tasks
from chorale.serve.fleet.holds import HoldClient

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle

logger = logging.getLogger(__name__)


class _Call:
    """A call of ``Engine.hold`` for one request. ``replica`` is set once a replica has accepted it."""

    __slots__ = ("replica", "response", "task", "ticket")

    def __init__(self, ticket: Ticket) -> None:
        self.ticket = ticket
        self.replica: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.response: Any = None
        self.task: asyncio.Task[None] | None = None


class RayAssigner:
    """An ``Assigner``. All its code runs on the event loop of the handle's router."""

    def __init__(self, handle: DeploymentHandle, fleet: FleetClient) -> None:
        self._handle, self.fleet = handle, fleet
        self._holds = HoldClient()
        self._calls: dict[str, _Call] = {}

    def start(self) -> None:
        self._holds.start()

    async def close(self) -> None:
        for call in self._calls.values():
            call.response.cancel()
        await end_tasks(*(call.task for call in self._calls.values()))
        self._holds.close()

    # ------------------------------------------------------------------ Assigner

    async def assign(self, ticket: Ticket) -> str:
        call = self._calls[ticket.name] = _Call(ticket)
        # Needs a new context: Ray identifies a call by the HTTP request in its context, but one HTTP request
        # may make several calls.
        contextvars.Context().run(self._send, call)
        try:
            return await call.replica
        except BaseException:
            self._calls.pop(ticket.name, None)
            call.response.cancel()
            self._holds.ended_anywhere(ticket.name)  # its replica is unknown
            raise

    def ended(self, ticket: Ticket) -> None:
        call = self._calls.pop(ticket.name, None)
        if call is not None and call.replica.done() and not call.replica.cancelled():
            self._holds.ended(call.replica.result(), ticket.name)

    def _send(self, call: _Call) -> None:
        call.response = self._handle.hold.remote(call.ticket.name, self._holds.front)
        call.task = asyncio.get_running_loop().create_task(self._follow(call))

    async def _follow(self, call: _Call) -> None:
        try:
            await call.response
        except asyncio.CancelledError:
            return
        except Exception as error:  # the replica died; the fleet notices and moves the request
            logger.debug("the call for %s ended: %r", call.ticket.name, error)
            message = f"Ray could not assign the request ({type(error).__name__})"
        else:
            message = "the engine ended the call"
        if not call.replica.done():
            call.replica.set_exception(EngineDeadError(message, retry_after=1.0))

    # ------------------------------------------------------------------ called by the router

    def ticket(self, name: str) -> Ticket | None:
        call = self._calls.get(name)
        return call.ticket if call is not None else None

    def routed(self, name: str, replica: str) -> None:
        """Records that ``replica`` has accepted the call for the request ``name``."""
        call = self._calls.get(name)
        if call is None:  # the request has already ended
            self._holds.ended(replica, name)
        elif not call.replica.done():
            call.replica.set_result(replica)

    def replicas(self, found: Mapping[str, Mapping[str, Any]]) -> None:
        """Updates the fleet from ``Engine.record_replica_metadata`` of each replica that takes requests."""
        known = {name: facts for name, facts in found.items() if "engine" in facts}
        for name, facts in known.items():
            self._holds.connect(name, facts["holds"], facts["public_key"])
        self.fleet.set_members(
            {
                name: EngineAddress(facts["engine"], facts["beats"], facts["public_key"])
                for name, facts in known.items()
            }
        )
        busy = {call.replica.result() for call in self._calls.values() if _is_routed(call)}
        self._holds.keep({*known, *busy})


# The assigners of this process by application and deployment, for the routers, which Ray creates.
ASSIGNERS: dict[tuple[str, str], RayAssigner] = {}


def _is_routed(call: _Call) -> bool:
    return call.replica.done() and not call.replica.cancelled() and call.replica.exception() is None
