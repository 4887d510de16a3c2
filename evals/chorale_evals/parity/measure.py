"""Makes a Recording: every text twice through a server, once alone and once in a crowd.

The first request scores the text and continues it at temperature 0, with the server to itself. The second
scores text and continuation together, while other requests run, so that batches and chunks are others and
the continuation, which was computed token by token, is now computed as a prompt. What differs between the
two is rounding: the server's own noise, against which a second server is judged.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from chorale.errors import ConfigError
from chorale_evals.parity.recording import Reading, Recording, Scores
from chorale_evals.parity.scorer import Answer, Scorer
from chorale_evals.parity.texts import Text, make_texts

TOKENS_IN_FLIGHT = 65_536  # of the second pass
REQUESTS_IN_FLIGHT = 16

OnText = Callable[[int], None]  # called with the tokens of each request that has been answered


@dataclass(frozen=True, slots=True)
class Plan:
    """``texts`` with the tokens that continue each in the reference's recording; None: the server's own."""

    texts: tuple[Text, ...]
    continuations: tuple[tuple[int, ...], ...] | None
    num_greedy: int
    top_k: int

    @property
    def num_tokens(self) -> int:
        """Returns about how many tokens are computed, for the progress bar."""
        return sum(2 * (text.length + self.num_greedy) for text in self.texts)


def new_plan(lengths: Sequence[int], number: int, num_greedy: int, top_k: int) -> Plan:
    return Plan(tuple(make_texts(lengths, number)), None, num_greedy, top_k)


def plan_of(reference: Recording) -> Plan:
    """Returns the plan that compares a server with a recording."""
    readings = reference.readings
    greedy = max((len(one.greedy) for one in readings), default=1)
    return Plan(
        tuple(one.text for one in readings),
        tuple(one.continuation for one in readings),
        greedy,
        reference.top_k,
    )


def measure(scorer: Scorer, plan: Plan, on_text: OnText, about: dict[str, object]) -> Recording:
    """Raises ``ConfigError`` for texts that are too long, ``ChoraleError`` if the server fails."""
    _check_lengths(scorer, plan)
    alone = []
    for text in plan.texts:
        alone.append(scorer.score(text.token_ids, plan.num_greedy))
        on_text(text.length + plan.num_greedy)
    continuations = plan.continuations or tuple(one.greedy for one in alone)
    again = _in_a_crowd(scorer, plan, continuations, on_text)
    readings = tuple(
        Reading(text, first.prompt, first.greedy, first.greedy_scores, continuation, second)
        for text, first, continuation, second in zip(plan.texts, alone, continuations, again, strict=True)
    )
    return Recording(readings, plan.top_k, {**about, "form": scorer.form})


def _check_lengths(scorer: Scorer, plan: Plan) -> None:
    longest = scorer.longest()
    needed = max(text.length for text in plan.texts) + plan.num_greedy + 1
    if longest is not None and needed > longest:
        raise ConfigError(
            f"{scorer.where} takes at most {longest} tokens, and the longest text needs {needed} with its "
            "continuation: give shorter --lengths"
        )


def _in_a_crowd(
    scorer: Scorer, plan: Plan, continuations: Sequence[tuple[int, ...]], on_text: OnText
) -> list[Scores]:
    room = _Room(TOKENS_IN_FLIGHT)
    lock = threading.Lock()

    def one(text: Text, continuation: tuple[int, ...]) -> Scores:
        prompt = (*text.token_ids, *continuation)
        with room.taken(len(prompt)):
            answer: Answer = scorer.score(prompt, 1)
        with lock:
            on_text(text.length + plan.num_greedy)
        return answer.prompt

    with ThreadPoolExecutor(REQUESTS_IN_FLIGHT) as pool:
        jobs = [pool.submit(one, *pair) for pair in zip(plan.texts, continuations, strict=True)]
        try:
            return [job.result() for job in jobs]
        finally:
            for job in jobs:
                job.cancel()


class _Room:
    """Limits the tokens of requests that run at once. A request above the limit runs alone."""

    def __init__(self, limit: int) -> None:
        self._free, self._limit, self._changed = limit, limit, threading.Condition()

    @contextlib.contextmanager
    def taken(self, number: int) -> Iterator[None]:
        number = min(number, self._limit)
        with self._changed:
            self._changed.wait_for(lambda: self._free >= number)
            self._free -= number
        try:
            yield
        finally:
            with self._changed:
                self._free += number
                self._changed.notify_all()
