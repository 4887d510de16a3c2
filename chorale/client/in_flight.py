"""InFlightRequests: one client's requests in the engine: admission, delivery, and completion rate.

A choice is admitted if ``capacity`` allows it. A request of several parts first reserves places for all of
them, so that it is admitted or refused as a whole and its parts do not compete for the queue.

Runs on the event loop's thread; uses no sockets, and only the clock that is passed in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from chorale.client.stream import OnClose, RequestStream
from chorale.engine.types import GenerateRequest, TokenChunk
from chorale.errors import ChoraleError, ConflictError, QueueFullError, RequestError

DEFAULT_QUEUE_FACTOR = 4  # choices that may wait, per choice that may run
RETRY_AFTER_MIN, RETRY_AFTER_MAX = 1.0, 60.0  # seconds
RATE_MEMORY = 0.8  # weight of the past in the completion rate, per tick


def total_capacity(max_num_seqs: int, max_queued_requests: int | None) -> int:
    """Return how many choices may run or wait. ``max_queued_requests`` None: four may wait for each that may
    run."""
    queued = DEFAULT_QUEUE_FACTOR * max_num_seqs if max_queued_requests is None else max_queued_requests
    return max_num_seqs + queued


class InFlightRequest:
    """One request: its stream, the choices still open, and since when its reader has been behind."""

    __slots__ = ("behind_since", "open_choices", "stream")

    def __init__(self, stream: RequestStream, num_choices: int) -> None:
        self.stream = stream
        self.open_choices = set(range(num_choices))
        self.behind_since: float | None = None


class InFlightRequests:
    """``capacity`` counts the choices of this client, ``most`` those that one request may have.

    Both are None until the engine reports how many it can run. ``most`` exceeds ``capacity`` if several
    processes share an engine: an idle process admits as much as the whole server can hold.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.capacity: int | None = None
        self.most: int | None = None
        self.num_in_flight = 0
        self._reserved: dict[str, int] = {}  # choices of requests that are admitted and not submitted yet
        self._entries: dict[str, InFlightRequest] = {}
        self._clock = clock
        self._num_ended = 0  # choices, since the last tick
        self._ticked = clock()
        self._ended_per_second = 0.0

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def ids(self) -> list[str]:
        return list(self._entries)

    def set_capacity(self, total: int, num_processes: int = 1) -> None:
        """``total``: the choices that the engine may run and hold waiting, for all of its clients."""
        self.most = total
        self.capacity = max(total // num_processes, 1)

    @property
    def num_admitted(self) -> int:
        return self.num_in_flight + sum(self._reserved.values())

    def reserve(self, num_choices: Mapping[str, int]) -> None:
        """Admit the parts of one request (request id to choices): all of them, or none of them.

        ``admit`` uses a reserved place, ``release`` gives back those that were not used. Raises
        ``QueueFullError`` (with the expected wait), or ``RequestError`` for a request that can never fit.
        """
        self._require_room(sum(num_choices.values()), "prompt" if len(num_choices) > 1 else "n")
        self._reserved.update(num_choices)

    def release(self, request_ids: Iterable[str]) -> None:
        """Give back the reserved places of these requests that were not submitted. Idempotent."""
        for request_id in request_ids:
            self._reserved.pop(request_id, None)

    def admit(self, request: GenerateRequest, on_close: OnClose) -> RequestStream:
        """Count the request in. Raises what ``reserve`` does, or ``ConflictError``."""
        request_id, num_choices = request.request_id, request.sampling.n
        if request_id in self._entries:
            raise ConflictError(f"a request with the id {request_id} is already running")
        if self._reserved.pop(request_id, None) is None:
            self._require_room(num_choices)
        stream = RequestStream(request_id, num_choices, on_close)
        self._entries[request_id] = InFlightRequest(stream, num_choices)
        self.num_in_flight += num_choices
        return stream

    def _require_room(self, num_choices: int, param: str = "n") -> None:
        if self.most is not None and num_choices > self.most:
            raise RequestError(
                f"{param}: {num_choices} choices in all; this server runs and queues at most {self.most} "
                "at a time (--max-num-seqs plus --max-queued-requests)",
                param=param,
                code="too_many_choices",
            )
        num_admitted = self.num_admitted
        # An idle process admits a request above its share, which could never be admitted otherwise.
        if self.capacity is not None and num_admitted and num_admitted + num_choices > self.capacity:
            raise QueueFullError(
                f"the queue is full: {num_admitted} choices are running or waiting",
                retry_after=self.retry_after(num_choices),
            )

    def retry_after(self, num_choices: int) -> float:
        """Return the seconds until there is room, at the rate at which choices have been ending."""
        excess = self.num_admitted + num_choices - (self.capacity or 0)
        if self._ended_per_second <= 0.0:
            return RETRY_AFTER_MIN
        return min(max(excess / self._ended_per_second, RETRY_AFTER_MIN), RETRY_AFTER_MAX)

    def deliver(self, chunks: Iterable[TokenChunk]) -> None:
        """Hand chunks to their streams; those of requests and choices that left are dropped."""
        entries = self._entries
        for chunk in chunks:
            entry = entries.get(chunk.request_id)
            if entry is None or chunk.index not in entry.open_choices:
                continue
            if chunk.finish_reason is not None:
                self._choice_ended(entry, chunk.request_id, chunk.index)
            entry.stream.push(chunk)

    def _choice_ended(self, entry: InFlightRequest, request_id: str, index: int) -> None:
        entry.open_choices.discard(index)
        self.num_in_flight -= 1
        self._num_ended += 1
        if not entry.open_choices:
            del self._entries[request_id]

    def remove(self, request_id: str) -> InFlightRequest | None:
        """Forget a request that its consumer left or its engine lost; its later chunks are dropped."""
        entry = self._entries.pop(request_id, None)
        if entry is not None:
            self.num_in_flight -= len(entry.open_choices)
        return entry

    def leave(self, request_id: str, index: int | None) -> bool:
        """Forget a request, or one choice of it, that its consumer left. Returns False if it was not open."""
        if index is None:
            return self.remove(request_id) is not None
        entry = self._entries.get(request_id)
        if entry is None or index not in entry.open_choices:
            return False
        self._choice_ended(entry, request_id, index)
        return True

    def abort(self, request_id: str) -> bool:
        """End a request's stream with finish_reason "abort", at once. Returns False if it is unknown."""
        entry = self.remove(request_id)
        if entry is None:
            return False
        for index in sorted(entry.open_choices):
            entry.stream.push(TokenChunk(request_id, index, [], finish_reason="abort"))
        return True

    def fail_all(self, make_error: Callable[[], ChoraleError]) -> None:
        """End every stream, each with its own error object, because the engine is lost."""
        entries, self._entries, self.num_in_flight = list(self._entries.values()), {}, 0
        for entry in entries:
            entry.stream.fail(make_error())

    def tick(self) -> None:
        """Update the completion rate. Call about twice a second."""
        now = self._clock()
        elapsed, self._ticked = now - self._ticked, now
        if elapsed > 0:
            rate, self._num_ended = self._num_ended / elapsed, 0
            self._ended_per_second = RATE_MEMORY * self._ended_per_second + (1 - RATE_MEMORY) * rate

    def slow_readers(self, max_pending_tokens: int, patience: float) -> list[str]:
        """Return the requests that have had more than ``max_pending_tokens`` unread tokens for ``patience``
        seconds."""
        now, slow = self._clock(), []
        for request_id, entry in self._entries.items():
            if entry.stream.num_pending_tokens <= max_pending_tokens:
                entry.behind_since = None
            elif entry.behind_since is None:
                entry.behind_since = now
            elif now - entry.behind_since >= patience:
                slow.append(request_id)
        return slow
