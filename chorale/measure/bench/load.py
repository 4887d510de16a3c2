"""Load generation: starts requests on schedule and records the outcome of each."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from chorale.measure.bench.connection import EventConnection, HttpError, Target, open_connection


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """A request to send."""

    body: str  # JSON
    prompt_tokens: int


@dataclass(slots=True)
class Outcome:
    """The result of one request. Times are seconds; ``start`` counts from the beginning of the load."""

    start: float = 0.0
    ttft: float = 0.0  # time to the first text
    latency: float = 0.0  # time to the end of the stream
    itl: list[float] = field(default_factory=list)  # seconds between pieces of text
    prompt_tokens: int = 0
    output_tokens: int = 0
    error: str = ""

    @property
    def tpot(self) -> float | None:
        """Seconds per output token after the first."""
        if self.output_tokens < 2:
            return None
        return (self.latency - self.ttft) / (self.output_tokens - 1)


@dataclass(frozen=True, slots=True)
class Pace:
    """The schedule of request starts."""

    rate: float = float("inf")  # requests a second
    burstiness: float = 1.0  # 1: Poisson; lower: burstier; higher: more even
    concurrency: int | None = None
    seed: int = 0
    ramp: Literal["", "linear", "exponential"] = ""  # curve from rate to last_rate over the requests
    last_rate: float = float("inf")

    def starts(self, count: int) -> Iterator[float]:
        """Yields the start time of each request, in seconds from the beginning."""
        generator, now = random.Random(self.seed), 0.0
        for number in range(count):
            yield now
            rate = self._rate(number / max(count - 1, 1))
            if rate != float("inf"):
                now += generator.gammavariate(self.burstiness, 1.0 / (rate * self.burstiness))

    def _rate(self, progress: float) -> float:
        """Returns the requests per second once this share of the requests has started (0 to 1)."""
        if self.ramp == "linear":
            return self.rate + (self.last_rate - self.rate) * progress
        if self.ramp == "exponential":
            return float(self.rate * (self.last_rate / self.rate) ** progress)
        return self.rate


class Load:
    """Sends requests to a target. Call ``run`` only once."""

    def __init__(self, target: Target, pace: Pace, on_done: Callable[[Outcome], None] | None = None) -> None:
        self._target, self._pace, self._on_done = target, pace, on_done
        self._idle: list[EventConnection] = []
        self._begin = 0.0

    async def run(self, requests: Sequence[LoadRequest]) -> list[Outcome]:
        """Returns the outcomes in the order of the requests."""
        limit = asyncio.Semaphore(self._pace.concurrency or len(requests) or 1)
        self._begin = time.perf_counter()
        tasks = []
        for request, start in zip(requests, self._pace.starts(len(requests)), strict=True):
            delay = self._begin + start - time.perf_counter()
            if delay > 0:
                await asyncio.sleep(delay)
            tasks.append(asyncio.ensure_future(self._limited(request, limit)))
        outcomes = await asyncio.gather(*tasks)
        for connection in self._idle:
            connection.close()
        return outcomes

    async def _limited(self, request: LoadRequest, limit: asyncio.Semaphore) -> Outcome:
        async with limit:
            outcome = await self._one(request)
        if self._on_done is not None:
            self._on_done(outcome)
        return outcome

    async def _one(self, request: LoadRequest) -> Outcome:
        begin = time.perf_counter()
        outcome = Outcome(start=begin - self._begin, prompt_tokens=request.prompt_tokens)
        connection = None
        try:
            connection = self._idle.pop() if self._idle else await open_connection(self._target)
            await connection.request(self._target, request.body.encode())
            await _read(connection, begin, outcome)
        except (OSError, HttpError, ValueError) as error:
            outcome.error = outcome.error or f"{type(error).__name__}: {error}"
        if connection is not None:
            if connection.reusable and connection.reply.done:
                self._idle.append(connection)
            else:
                connection.close()
        return outcome


# Events with one of these must be parsed. Quotes are escaped inside text, so text cannot contain them.
_UNUSUAL = (b'"choices":[]', b'"usage":{', b'"error"')


async def _read(connection: EventConnection, begin: float, outcome: Outcome) -> None:
    last = 0.0
    while events := await connection.wait():
        for event, now in events:
            if last == 0.0:
                if _has_text(event, outcome):
                    last, outcome.ttft = now, now - begin
            elif not any(mark in event for mark in _UNUSUAL) and event != b"[DONE]":
                outcome.itl.append(now - last)  # an ordinary piece of text, not parsed
                last = now
            elif event != b"[DONE]" and _has_text(event, outcome):
                outcome.itl.append(now - last)
                last = now
    outcome.latency = (last or time.perf_counter()) - begin
    if connection.reply.status != 200:
        text = bytes(connection.reply.body[:300]).decode("utf-8", "replace")
        outcome.error = f"HTTP {connection.reply.status}: {text}"
    elif last == 0.0 and not outcome.error:
        outcome.error = "the server returned no text"
    elif outcome.output_tokens == 0:
        outcome.output_tokens = 1 + len(outcome.itl)  # the server sent no usage: count pieces


def _has_text(event: bytes, outcome: Outcome) -> bool:
    """Records the usage or error of an event. Returns whether it contains text."""
    if event == b"[DONE]":
        return False
    data = json.loads(event)
    if not isinstance(data, dict):
        raise ValueError(f"an event is not a JSON object: {event[:80]!r}")
    error = data.get("error")
    if error:  # some servers send a string
        outcome.error = str(error.get("message", error) if isinstance(error, dict) else error)
        return False
    usage = data.get("usage")
    if usage:
        outcome.output_tokens = int(usage.get("completion_tokens") or 0)
        outcome.prompt_tokens = int(usage.get("prompt_tokens") or outcome.prompt_tokens)
    return any(_choice_text(choice) for choice in data.get("choices", []))


def _choice_text(choice: dict[str, Any]) -> bool:
    if choice.get("text") or choice.get("token_ids"):
        return True
    delta = choice.get("delta") or {}
    named = ("content", "reasoning", "reasoning_content", "tool_calls")
    return any(delta.get(name) for name in named)
