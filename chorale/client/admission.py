"""Admission: limits the choices in flight on one or several engines, and estimates when to retry.

A choice is admitted if ``capacity`` allows it, or if its owner uses less than its share (``Shares``). An API
request with several prompts first reserves capacity for all of them, so that it is admitted or refused as a
whole and its prompts do not compete for the queue. Nothing is admitted while ``max_num_queued_tokens`` prompt
tokens or more wait for their first output token.

Runs on the event loop's thread; uses no sockets, and only the clock that is passed in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from chorale.client.shares import Shares
from chorale.config.engine import ServerConfig
from chorale.engine.types import NOBODY, GenerateRequest, Owner
from chorale.errors import OverloadedError, QueueFullError, RequestError

DEFAULT_QUEUE_FACTOR = 4  # choices that may wait, per choice that may run
RETRY_AFTER_MIN, RETRY_AFTER_MAX = 1.0, 60.0  # seconds
NO_LIMITS = ServerConfig()
RATE_MEMORY = 0.8  # weight of the previous completion rate at each tick


def capacity(limits: ServerConfig, max_num_seqs: int) -> int:
    """Return how many choices may run or wait on engines that run ``max_num_seqs``. Without any limit, four
    may wait for each that may run."""
    waiting, total = limits.max_queued_requests, limits.max_num_queued_reqs
    if waiting is None and total is not None:
        return total
    most = max_num_seqs + (DEFAULT_QUEUE_FACTOR * max_num_seqs if waiting is None else waiting)
    return most if total is None else min(most, total)


class Admission:
    """``capacity`` limits the choices of this process, ``most`` the choices of one request.

    Both are None until an engine reports how many it can run. ``most`` exceeds ``capacity`` if several
    processes share the engines: an idle process may fill the whole server with one request.
    """

    def __init__(self, clock: Callable[[], float], limits: ServerConfig = NO_LIMITS) -> None:
        """``limits``: those of all engines and API processes together, which share them."""
        self.limits = limits
        self.capacity: int | None = None
        self.most: int | None = None
        self.num_in_flight = 0
        self.num_prompt_tokens = 0  # of requests without an output token; set by ``InFlightRequests``
        self._shares = Shares()
        # Owner and choices of each request that is reserved and not yet submitted, by request id.
        self._reserved: dict[str, tuple[Owner, int]] = {}
        self._clock = clock
        self._num_ended = 0  # choices that have ended since the last tick
        self._ticked = clock()
        self._ended_per_second = 0.0
        self._is_overload = False  # whether ``capacity`` is that of vLLM's limit

    def set_capacity(self, total: int) -> None:
        """``total``: number of choices that the engines may run and queue for all clients."""
        self.most = max(total, 1)
        self.capacity = self._share(total)
        self._is_overload = total == self.limits.max_num_queued_reqs

    @property
    def num_admitted(self) -> int:
        return self._shares.total

    def reserve(self, num_choices: Mapping[str, int], owner: Owner = NOBODY) -> None:
        """Admit several requests (request id to number of choices): either all of them or none.

        ``admit`` uses a reservation, ``release`` cancels unused ones. Raises ``QueueFullError`` (with the
        expected wait), or ``RequestError`` for more choices than can ever be admitted.
        """
        total = sum(num_choices.values())
        self._require_room(total, owner, "prompt" if len(num_choices) > 1 else "n")
        self._shares.take(owner, total)
        self._reserved |= {request_id: (owner, count) for request_id, count in num_choices.items()}

    def release(self, request_ids: Iterable[str]) -> None:
        """Cancel the reservations of these requests that were not submitted. Idempotent."""
        for request_id in request_ids:
            if (reserved := self._reserved.pop(request_id, None)) is not None:
                self._shares.give(*reserved)

    def admit(self, request: GenerateRequest) -> None:
        """Admit a request. Raises the same errors as ``reserve``."""
        owner, num_choices = request.owner, request.sampling.n
        if request.request_id in self._reserved:
            self.release([request.request_id])
        else:
            self._require_room(num_choices, owner)
        self.admit_again(num_choices, owner)

    def admit_again(self, num_choices: int, owner: Owner) -> None:
        """Admit choices again whose engine was lost. They are never refused."""
        self.num_in_flight += num_choices
        self._shares.take(owner, num_choices)

    def forget(self, num_choices: int, owner: Owner) -> None:
        """Stop counting choices that have ended or that their consumer or their engine dropped."""
        self.num_in_flight -= num_choices
        self._shares.give(owner, num_choices)

    def choice_ended(self, owner: Owner) -> None:
        self.forget(1, owner)
        self._num_ended += 1

    def _share(self, total: int) -> int:
        """Return the part of a limit that this process may use: at least 1, unless nothing is allowed."""
        return max(total // self.limits.api_server_count, min(total, 1))

    def _require_room(self, num_choices: int, owner: Owner, param: str = "n") -> None:
        if self.most is not None and num_choices > self.most:
            raise RequestError(
                f"{param}: {num_choices} choices in all; this server runs and queues at most {self.most} "
                "at a time (--max-num-seqs plus --max-queued-requests, --max-num-queued-reqs)",
                param=param,
                code="too_many_choices",
            )
        num_admitted = self.num_admitted
        # An idle process admits a request above its share, which could never be admitted otherwise.
        if self.capacity == 0 or (
            self.capacity is not None
            and num_admitted
            and not self._shares.admits(owner, num_choices, self.capacity)
        ):
            text = f"the queue is full: {num_admitted} choices are running or waiting"
            after = self.retry_after(num_choices)
            if self._is_overload:
                raise OverloadedError(text, code="max_num_queued_reqs", retry_after=after)
            raise QueueFullError(text, retry_after=after)
        most = self.limits.max_num_queued_tokens
        if most is not None and self.num_prompt_tokens >= self._share(most):
            raise OverloadedError(
                f"{self.num_prompt_tokens} prompt tokens wait to be computed",
                code="max_num_queued_tokens",
                retry_after=RETRY_AFTER_MIN,
            )

    def retry_after(self, num_choices: int) -> float:
        """Return the estimated seconds until there is room, at the recent completion rate."""
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
