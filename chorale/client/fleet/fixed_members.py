"""FixedFleet: the engines of one server (``-dp``), all of which are known at start."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Unpack

from chorale.client.fleet.fleet import FleetClient, FleetOptions
from chorale.client.fleet.members import Ticket
from chorale.client.remote import MIN_RETRY_AFTER
from chorale.client.wire.messages import local_address
from chorale.errors import EngineDeadError


class Cheapest:
    """An ``Assigner`` that chooses the engine with the lowest cost, as soon as any is ready."""

    def __init__(self, fleet: FleetClient) -> None:
        self._fleet = fleet

    async def assign(self, ticket: Ticket) -> str:
        """See ``Assigner``. Raises ``EngineDeadError`` if no engine will be started again."""
        members = self._fleet.members
        while not (names := members.rank(ticket, members.by_name, unfollowed=True)):
            status = self._fleet.status
            if status.state == "failed":
                raise EngineDeadError(status.message, retry_after=MIN_RETRY_AFTER)
            await members.change()
        return names[0]

    def ended(self, ticket: Ticket) -> None:
        """Does nothing: the engines themselves report what they run."""


class FixedFleet(FleetClient):
    """The ``EngineClient`` of the engines whose sockets are in ``directories``.

    Call ``start()`` on the event loop before the first ``submit``, and ``await close()`` at the end. While no
    engine is ready, new requests are refused, and those in flight wait.
    """

    def __init__(self, directories: Sequence[str | Path], **options: Unpack[FleetOptions]) -> None:
        super().__init__(Cheapest, gone_patience=0.0, **(FleetOptions(first_slot=0) | options))
        self._addresses = {str(index): local_address(each) for index, each in enumerate(directories)}

    def start(self) -> None:
        super().start()
        self.set_members(self._addresses)

    def mark_failed(self, message: str) -> None:
        """Called when the supervisor gives up: no engine will be started again."""
        for remote in self._remotes:
            remote.mark_failed(message)
