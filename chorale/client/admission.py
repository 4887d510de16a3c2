"""Admission: how many choices may be in flight, over one engine or several, and how long a refused one waits.

A choice is admitted if ``capacity`` allows it, or if its owner holds less than its share (``Shares``). A
request of several parts first reserves places for all of them, so that it is admitted or refused as a whole
and its parts do not compete for the queue.

Runs on the event loop's thread; uses no sockets, and only the clock that is passed in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from chorale.client.shares import Shares
from chorale.engine.types import NOBODY, GenerateRequest, Owner
from chorale.errors import QueueFullError, RequestError

DEFAULT_QUEUE_FACTOR = 4  # choices that may wait, per choice that may run
RETRY_AFTER_MIN, RETRY_AFTER_MAX = 1.0, 60.0  # seconds
RATE_MEMORY = 0.8  # weight of the past in the completion rate, per tick


def total_capacity(max_num_seqs: int, max_queued_requests: int | None) -> int:
    """Return how many choices may run or wait. ``max_queued_requests`` None: four may wait for each that may
    run."""
    queued = DEFAULT_QUEUE_FACTOR * max_num_seqs if max_queued_requests is None else max_queued_requests
    return max_num_seqs + queued


class Admission:
    """``capacity`` counts the choices of this process, ``most`` those that one request may have.

    Both are None until an engine reports how many it can run. ``most`` exceeds ``capacity`` if several
    processes share the engines: an idle process admits as much as the whole server can hold.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.capacity: int | None = None
        self.most: int | None = None
        self.num_in_flight = 0
        self._shares = Shares()
        # Choices of requests that are admitted and not submitted yet.
        self._reserved: dict[str, tuple[Owner, int]] = {}
        self._clock = clock
        self._num_ended = 0  # choices, since the last tick
        self._ticked = clock()
        self._ended_per_second = 0.0

    def set_capacity(self, total: int, num_processes: int = 1) -> None:
        """``total``: the choices that the engines may run and hold waiting, for all of their clients."""
        self.most = total
        self.capacity = max(total // num_processes, 1)

    @property
    def num_admitted(self) -> int:
        return self._shares.total

    def reserve(self, num_choices: Mapping[str, int], owner: Owner = NOBODY) -> None:
        """Admit the parts of one request (request id to choices): all of them, or none of them.

        ``admit`` uses a reserved place, ``release`` gives back those that were not used. Raises
        ``QueueFullError`` (with the expected wait), or ``RequestError`` for a request that can never fit.
        """
        total = sum(num_choices.values())
        self._require_room(total, owner, "prompt" if len(num_choices) > 1 else "n")
        self._shares.take(owner, total)
        self._reserved |= {request_id: (owner, count) for request_id, count in num_choices.items()}

    def release(self, request_ids: Iterable[str]) -> None:
        """Give back the reserved places of these requests that were not submitted. Idempotent."""
        for request_id in request_ids:
            if (reserved := self._reserved.pop(request_id, None)) is not None:
                self._shares.give(*reserved)

    def admit(self, request: GenerateRequest) -> None:
        """Count a request in. Raises what ``reserve`` does."""
        owner, num_choices = request.owner, request.sampling.n
        if request.request_id in self._reserved:
            self.release([request.request_id])
        else:
            self._require_room(num_choices, owner)
        self.admit_again(num_choices, owner)

    def admit_again(self, num_choices: int, owner: Owner) -> None:
        """Count in choices that were admitted, and whose engine was lost."""
        self.num_in_flight += num_choices
        self._shares.take(owner, num_choices)

    def forget(self, num_choices: int, owner: Owner) -> None:
        """Count choices out that their consumer left or their engine lost."""
        self.num_in_flight -= num_choices
        self._shares.give(owner, num_choices)

    def choice_ended(self, owner: Owner) -> None:
        self.forget(1, owner)
        self._num_ended += 1

    def _require_room(self, num_choices: int, owner: Owner, param: str = "n") -> None:
        if self.most is not None and num_choices > self.most:
            raise RequestError(
                f"{param}: {num_choices} choices in all; this server runs and queues at most {self.most} "
                "at a time (--max-num-seqs plus --max-queued-requests)",
                param=param,
                code="too_many_choices",
            )
        num_admitted = self.num_admitted
        # An idle process admits a request above its share, which could never be admitted otherwise.
        if (
            self.capacity is not None
            and num_admitted
            and not self._shares.admits(owner, num_choices, self.capacity)
        ):
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

    def tick(self) -> None:
        """Update the completion rate. Call about twice a second."""
        now = self._clock()
        elapsed, self._ticked = now - self._ticked, now
        if elapsed > 0:
            rate, self._num_ended = self._num_ended / elapsed, 0
            self._ended_per_second = RATE_MEMORY * self._ended_per_second + (1 - RATE_MEMORY) * rate
