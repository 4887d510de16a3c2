"""Lanes: the waiting and running requests of a connection. A lane is sequential; lanes run concurrently."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from chorale.errors import QueueFullError, RequestError
from chorale.machine.tasks import end_tasks

# OpenAI's limits per connection.
MAX_LANES = 32
MAX_RUNNING = 16
MAX_WAITING = 64


@dataclass(slots=True)
class Create:
    """A ``response.create`` message: the fields of its body, and its size in bytes."""

    data: dict[str, Any]
    lane: str | None
    num_bytes: int


@dataclass(slots=True)
class _Lane:
    waiting: deque[Create] = field(default_factory=deque)
    task: asyncio.Task[None] | None = None


class Lanes:
    """The lanes of a connection. ``answer`` is called for each request of a lane in order; it must not raise.

    ``max_bytes``: limit of all waiting requests together. Requests without ``stream_id`` share a lane.
    """

    def __init__(self, answer: Callable[[Create], Awaitable[None]], max_bytes: int) -> None:
        self._answer = answer
        self._max_bytes = max_bytes
        self._lanes: dict[str | None, _Lane] = {}
        self._slots = asyncio.Semaphore(MAX_RUNNING)
        self._num_bytes = 0
        self._num_waiting = 0

    def add(self, create: Create) -> None:
        """Queues a request. Raises ``RequestError`` or ``QueueFullError``."""
        if create.lane not in self._lanes:
            num_named = sum(name is not None for name in self._lanes)
            if create.lane is not None and num_named >= MAX_LANES:
                raise RequestError(
                    f"a connection may use at most {MAX_LANES} values of stream_id",
                    param="stream_id",
                    code="websocket_stream_limit_reached",
                )
            self._lanes[create.lane] = _Lane()
        full = self._num_waiting >= MAX_WAITING or self._num_bytes + create.num_bytes > self._max_bytes
        if self._num_waiting and full:
            raise QueueFullError("too many requests are waiting on this connection", retry_after=1.0)
        lane = self._lanes[create.lane]
        lane.waiting.append(create)
        self._num_waiting += 1
        self._num_bytes += create.num_bytes
        if lane.task is None:
            lane.task = asyncio.create_task(self._run(lane))

    async def _run(self, lane: _Lane) -> None:
        try:
            while lane.waiting:
                async with self._slots:
                    create = self._take(lane)
                    if create is not None:
                        await self._answer(create)
        finally:
            lane.task = None

    def _take(self, lane: _Lane) -> Create | None:
        if not lane.waiting:  # dropped while waiting for a slot
            return None
        create = lane.waiting.popleft()
        self._num_waiting -= 1
        self._num_bytes -= create.num_bytes
        return create

    def drop_waiting(self) -> list[Create]:
        """Removes and returns the waiting requests."""
        dropped = [create for lane in self._lanes.values() for create in lane.waiting]
        for lane in self._lanes.values():
            lane.waiting.clear()
        self._num_waiting = self._num_bytes = 0
        return dropped

    async def finish(self) -> None:
        """Waits until no request is running or waiting."""
        while running := [lane.task for lane in self._lanes.values() if lane.task is not None]:
            await asyncio.wait(running)

    async def cancel(self) -> None:
        """Cancels all requests."""
        self.drop_waiting()
        await end_tasks(*(lane.task for lane in self._lanes.values()))
