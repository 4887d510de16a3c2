"""ReplicaClient: the EngineClient of several engine processes. Each request goes where it costs least.

A replica's cost is what it has to compute before this request's first token, and the rows that it runs
(``routing``). What it has cached is known exactly: each ``RemoteClient`` follows its engine's prefix index
(``follower``). A prompt is hashed as long as any replica has its blocks, and once for all of them; what
exceeds ``SLICE`` blocks is hashed between other work of the event loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from chorale.client.base import EngineStatus
from chorale.client.fleet.many_engines import SLICE, ManyEngines
from chorale.client.remote import MIN_RETRY_AFTER, ClientLimits, RemoteClient
from chorale.client.routing.cost import choose, cost
from chorale.client.routing.follower import Follower
from chorale.client.routing.prefix_index import PrefixSearch
from chorale.client.stream import RequestStream
from chorale.client.summary import ORDER, add_stats, merge_status
from chorale.engine.types import EngineStats, GenerateRequest, TokenChunk
from chorale.errors import ChoraleError, ConflictError, EngineDeadError, EngineError

logger = logging.getLogger(__name__)


class _Routing:
    """A request that is admitted, and whose prompt is still being hashed."""

    __slots__ = ("left", "request", "search", "stream", "task")

    def __init__(self, request: GenerateRequest, stream: RequestStream, search: PrefixSearch) -> None:
        self.request, self.stream, self.search = request, stream, search
        self.left: set[int] = set()  # choices that the consumer has left already
        self.task: asyncio.Task[None] | None = None


class ReplicaClient(ManyEngines):
    """An ``EngineClient``; see ``client.base``. Not thread-safe: everything happens on one event loop.

    Call ``start()`` on that loop before the first ``submit``, and ``await close()`` at the end. ``turn``: the
    replica that is taken first among equals, so that several processes do not all begin with the same.
    """

    def __init__(
        self,
        directories: Sequence[str | Path],
        *,
        max_queued_requests: int | None = None,
        num_api_processes: int = 1,
        limits: ClientLimits | None = None,
        clock: Callable[[], float] = time.monotonic,
        turn: int = 0,
    ) -> None:
        super().__init__(max_queued_requests, limits, clock, num_api_processes)
        self._followers = tuple(Follower() for _ in directories)
        self._replicas = tuple(
            RemoteClient(
                directory,
                limits=self._limits,
                on_status=self._status_changed,
                clock=clock,
                engine=index,
                admission=self._admission,
                follower=self._followers[index],
            )
            for index, directory in enumerate(directories)
        )
        self._turn = turn
        self._routings: dict[str, _Routing] = {}

    # ------------------------------------------------------------------ EngineClient

    @property
    def engines(self) -> tuple[RemoteClient, ...]:
        return self._replicas

    @property
    def status(self) -> EngineStatus:
        return merge_status([replica.status for replica in self._replicas])

    @property
    def stats(self) -> EngineStats:
        return add_stats([replica.stats for replica in self._replicas])

    def submit(self, request: GenerateRequest) -> RequestStream:
        self._require_engine()
        request_id = request.request_id
        if request_id in self._routings or any(replica.holds(request_id) for replica in self._replicas):
            raise ConflictError(f"a request with the id {request_id} is already running")
        self._admission.admit(request)
        stream = RequestStream(request_id, request.sampling.n, self._left)
        routing = _Routing(request, stream, PrefixSearch(request, [f.index for f in self._followers]))
        if routing.search.advance(SLICE):
            self._send(routing)
        else:
            self._routings[request_id] = routing
            routing.task = asyncio.get_running_loop().create_task(self._search_on(routing))
        return stream

    def abort(self, request_id: str) -> None:
        routing = self._stop_routing(request_id)
        if routing is not None:
            for index in range(routing.request.sampling.n):
                if index not in routing.left:
                    routing.stream.push(TokenChunk(request_id, index, [], finish_reason="abort"))
        for replica in self._replicas:
            replica.abort(request_id)

    async def close(self) -> None:
        """Abort what is in flight and leave. Idempotent."""
        await self._stop_ticker()
        for request_id in list(self._routings):
            routing = self._stop_routing(request_id)
            if routing is not None:
                routing.stream.fail(EngineDeadError("the server is shutting down"))
        await asyncio.gather(*(replica.close() for replica in self._replicas))

    # ------------------------------------------------------------------ the supervisor's side

    def start(self) -> None:
        """Open the sockets on the running event loop."""
        for replica in self._replicas:
            replica.start()
        self._start_ticker()

    def mark_failed(self, message: str) -> None:
        """Called when the supervisor gives up: no engine will be started again."""
        for replica in self._replicas:
            replica.mark_failed(message)

    # ------------------------------------------------------------------ routing

    async def _search_on(self, routing: _Routing) -> None:
        try:
            while not routing.search.advance(SLICE):
                await asyncio.sleep(0)
        except Exception as error:
            logger.exception("a request could not be routed")
            self._stop_routing(routing.request.request_id)
            routing.stream.fail(EngineError(f"the request could not be routed ({type(error).__name__})"))
            return
        del self._routings[routing.request.request_id]
        self._send(routing)

    def _send(self, routing: _Routing) -> None:
        """Submit an admitted request to the replica where it costs least."""
        request, hits = routing.request, routing.search.hits()
        place = self._choose(len(request.prompt_token_ids), hits)
        if place is None:  # they went while the prompt was being hashed
            self._admission.forget(request.sampling.n, request.owner)
            routing.stream.fail(self._no_engine())
            return
        self._turn = place + 1
        request = msgspec.structs.replace(request, num_expected_cached=hits[place])
        self._replicas[place].take(request, routing.stream, self._followers[place])
        for index in routing.left:
            self._replicas[place].leave(request.request_id, index)

    def _choose(self, num_prompt: int, hits: Sequence[int]) -> int | None:
        """Returns the cheapest of the replicas that are ready, else of those that drain, or None."""
        for state in ("ready", "draining"):
            costs = [
                cost(follower.load(), num_prompt, hit) if replica.status.state == state else None
                for replica, follower, hit in zip(self._replicas, self._followers, hits, strict=True)
            ]
            place = choose(costs, self._turn)
            if place is not None:
                return place
        return None

    def _stop_routing(self, request_id: str) -> _Routing | None:
        routing = self._routings.pop(request_id, None)
        if routing is not None:
            self._admission.forget(routing.request.sampling.n, routing.request.owner)
            if routing.task is not None:
                routing.task.cancel()
        return routing

    def _left(self, request_id: str, index: int | None) -> None:
        """Called when a consumer closes its stream early, or leaves one choice of it."""
        routing = self._routings.get(request_id)
        if routing is None:
            for replica in self._replicas:
                replica.leave(request_id, index)
            return
        if index is not None:
            routing.left.add(index)
        if index is None or len(routing.left) == routing.request.sampling.n:
            self._stop_routing(request_id)

    # ------------------------------------------------------------------ internals

    @property
    def _remotes(self) -> Sequence[RemoteClient]:
        return self._replicas

    def _require_engine(self) -> None:
        if self.status.state not in ("ready", "draining"):
            raise self._no_engine()

    def _no_engine(self) -> ChoraleError:
        """The error of the replica that will be back first."""
        best = min(self._replicas, key=lambda replica: ORDER.index(replica.status.state))
        try:
            best.require_engine()
        except ChoraleError as error:
            return error
        return EngineDeadError("no engine is running", retry_after=MIN_RETRY_AFTER)

    def _status_changed(self, status: EngineStatus) -> None:
        """Sum up what the replicas can take."""
        known = [each for each in self._replicas if each.is_known and each.status.state != "failed"]
        self._sum_up(known, [replica for replica in known if replica.status.state in ("ready", "draining")])
