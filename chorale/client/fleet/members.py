"""The engines of a fleet: their connections, which come and go, and the cost of a request on each."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Mapping

from chorale.client.admission import Admission
from chorale.client.base import LEFT, EngineInfo, EngineStatus
from chorale.client.remote import MIN_RETRY_AFTER, ClientLimits, RemoteClient
from chorale.client.routing.follower import Follower, cost
from chorale.client.routing.prefix_index import PrefixSearch
from chorale.client.summary import ORDER, without_gauges
from chorale.client.wire.messages import EngineAddress
from chorale.engine.types import EngineStats, GenerateRequest
from chorale.errors import ChoraleError, EngineDeadError, EngineLoadingError

SLICE = 512  # blocks of a prompt that are hashed without a pause: about half a millisecond
CONNECT = 5.0  # seconds to wait until an assigned engine can be reached


class Slot:
    """An ``EngineView`` with a fixed index in the fleet, used by one engine after another."""

    def __init__(self, index: int) -> None:
        self.index = index
        self._remote: RemoteClient | None = None
        self._last = EngineStats()  # statistics of the last engine that left

    @property
    def is_free(self) -> bool:
        return self._remote is None

    def take(self, remote: RemoteClient) -> None:
        self._remote = remote

    def free(self) -> None:
        if self._remote is not None:
            self._last = without_gauges(self._remote.stats)
        self._remote = None

    @property
    def info(self) -> EngineInfo:
        if self._remote is None:
            raise EngineLoadingError("the engine has left", retry_after=MIN_RETRY_AFTER)
        return self._remote.info

    @property
    def status(self) -> EngineStatus:
        if self._remote is None:
            return LEFT
        return self._remote.status

    @property
    def stats(self) -> EngineStats:
        return self._last if self._remote is None else self._remote.stats


class Member:
    """An engine of the fleet: its connection, a copy of its prefix index, and its backlog."""

    def __init__(
        self,
        name: str,
        address: EngineAddress,
        slot: Slot,
        limits: ClientLimits,
        admission: Admission,
        on_status: Callable[[EngineStatus], None],
    ) -> None:
        self.name, self.slot = name, slot
        self.follower = Follower()
        self.remote = RemoteClient(
            address,
            limits=limits,
            on_status=on_status,
            engine=slot.index,
            admission=admission,
            follower=self.follower,
        )
        slot.take(self.remote)

    @property
    def is_up(self) -> bool:
        """Returns whether the engine takes requests."""
        return self.remote.status.state == "ready"

    @property
    def is_followed(self) -> bool:
        return self.is_up and self.follower.index is not None


class Ticket:
    """A request that needs an engine, and the number of its tokens that each engine has cached."""

    __slots__ = ("hits", "name", "request")

    def __init__(self, request: GenerateRequest) -> None:
        self.name, self.request = request.request_id, request
        self.hits: dict[str, int] = {}  # cached tokens, by name of the member


class Members:
    """The engines that take requests (``by_name``), and those that only finish theirs (``leaving``)."""

    def __init__(
        self,
        limits: ClientLimits,
        admission: Admission,
        on_status: Callable[[], None],
        first_slot: int,
    ) -> None:
        """``first_slot``: slot that is ranked first if costs are equal; each ranking advances it."""
        self.by_name: dict[str, Member] = {}
        self.leaving: list[Member] = []
        self.slots: list[Slot] = []
        self._limits, self._admission, self._on_status = limits, admission, on_status
        self._first_slot = first_slot
        self._changed = asyncio.Event()
        self._closing: set[asyncio.Task[None]] = set()

    @property
    def up(self) -> list[RemoteClient]:
        return [member.remote for member in self.by_name.values() if member.is_up]

    def set(self, addresses: Mapping[str, EngineAddress]) -> None:
        """Set the engines that take requests. Engines that are no longer listed finish their requests."""
        for name in [name for name in self.by_name if name not in addresses]:
            member = self.by_name.pop(name)
            member.slot.free()
            self.leaving.append(member)
        for name, address in addresses.items():
            if name not in self.by_name:
                self.by_name[name] = self._connect(name, address)
        self.retire()

    def _connect(self, name: str, address: EngineAddress) -> Member:
        slot = next((slot for slot in self.slots if slot.is_free), None)
        if slot is None:
            slot = Slot(len(self.slots))
            self.slots.append(slot)
        member = Member(name, address, slot, self._limits, self._admission, self._status_changed)
        member.remote.start()
        return member

    def _status_changed(self, status: EngineStatus) -> None:
        self._changed.set()
        self._on_status()

    def retire(self) -> None:
        """Close the connections to engines that left, once their last request has ended."""
        for member in [member for member in self.leaving if not member.remote.num_in_flight]:
            self.leaving.remove(member)
            task = asyncio.get_running_loop().create_task(member.remote.close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        members = [*self.by_name.values(), *self.leaving]
        await asyncio.gather(*(member.remote.close() for member in members), *self._closing)

    async def look_up(self, request: GenerateRequest) -> Ticket:
        """Returns a ticket with the number of the request's tokens that each engine has cached."""
        ticket, members = Ticket(request), list(self.by_name.values())
        search = PrefixSearch(request, [member.follower.index for member in members])
        while not search.advance(SLICE):
            await asyncio.sleep(0)
        for member, hit in zip(members, search.hits(), strict=True):
            ticket.hits[member.name] = hit
        return ticket

    def rank(self, ticket: Ticket, names: Iterable[str], *, unfollowed: bool = False) -> list[str]:
        """Returns the ``names`` of engines whose index is followed, the cheapest for the request first.

        ``unfollowed``: also rank engines that are up but not followed yet, as if their cache were empty.
        """
        num_prompt, count = len(ticket.request.prompt_token_ids), max(len(self.slots), 1)
        costs = []
        for name in names:
            member = self.by_name.get(name)
            if member is None or not (member.is_up if unfollowed else member.is_followed):
                continue
            order = (member.slot.index - self._first_slot) % count
            costs.append((cost(member.follower.backlog(), num_prompt, ticket.hits.get(name, 0)), order, name))
        self._first_slot += 1
        return [name for _, _, name in sorted(costs)]

    def why_down(self) -> ChoraleError:
        """Returns the error of the engine in the best state (``ORDER``)."""
        remotes = sorted(
            (member.remote for member in self.by_name.values()),
            key=lambda remote: ORDER.index(remote.status.state),
        )
        try:
            for remote in remotes[:1]:
                remote.require_engine()
        except ChoraleError as error:
            return error
        if remotes:
            return EngineDeadError("no engine is running", retry_after=MIN_RETRY_AFTER)
        return EngineLoadingError("no engine is ready yet", retry_after=MIN_RETRY_AFTER)

    async def change(self) -> None:
        """Waits until the status of an engine changes."""
        self._changed.clear()
        await self._changed.wait()

    async def reach(self, name: str) -> Member | None:
        """Returns the member once it is up, or None if it is dead or not up within ``CONNECT`` seconds."""
        member = self.by_name.get(name)
        if member is not None and member.is_up:  # the usual case; a timer would cost some microseconds
            return member
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CONNECT):
                while True:
                    member = self.by_name.get(name)
                    if member is None or member.remote.status.state in ("dead", "failed"):
                        return None
                    if member.is_up:
                        return member
                    await self.change()
        return None
