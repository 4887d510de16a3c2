"""The engines of a fleet: connections that come and go, and the places where they are shown."""

from __future__ import annotations

from collections.abc import Callable

from chorale.client.admission import Admission
from chorale.client.base import EngineInfo, EngineStatus
from chorale.client.follower import Follower
from chorale.client.remote import MIN_RETRY_AFTER, ClientLimits, RemoteClient
from chorale.client.summary import without_gauges
from chorale.client.wire import EngineAddress
from chorale.engine.types import EngineStats
from chorale.errors import EngineLoadingError


class Slot:
    """An ``EngineView``: a place in the fleet, which one engine after the other takes."""

    def __init__(self, index: int) -> None:
        self.index = index
        self._remote: RemoteClient | None = None
        self._last = EngineStats()  # of the engine that left

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
            return EngineStatus("failed", message="the engine has left")
        return self._remote.status

    @property
    def stats(self) -> EngineStats:
        return self._last if self._remote is None else self._remote.stats


class Member:
    """An engine of the fleet: its connection, and what is known of its cache and load."""

    def __init__(
        self,
        name: str,
        address: EngineAddress,
        slot: Slot,
        limits: ClientLimits,
        admission: Admission,
        clock: Callable[[], float],
        on_status: Callable[[EngineStatus], None],
    ) -> None:
        self.name, self.slot = name, slot
        self.follower = Follower()
        self.remote = RemoteClient(
            address,
            limits=limits,
            on_status=on_status,
            clock=clock,
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
