"""Makes a Recording: sends every text to a server twice, once alone and once in a crowd of requests.

The first request scores the text and continues it at temperature 0, with the server to itself. The second
scores text and continuation together, while other requests run: batches and chunks differ, and the
continuation, which was computed token by token, is now computed as a prompt. Both results differ only by
rounding. This is the server's own noise, against which a second server is judged.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from chorale.errors import ConfigError
from chorale_evals.parity.recording import Reading, Recording, Scores
from chorale_evals.parity.scorer import Scorer
from chorale_evals.parity.texts import Text, make_texts

# Most tokens in flight in the second pass, if each request were as long as the longest one.
TOKENS_IN_FLIGHT = 131_072
REQUESTS_IN_FLIGHT = 16

OnText = Callable[[int], None]  # called after each answer with the request's number of tokens


@dataclass(frozen=True, slots=True)
class Plan:
    """``continuations``: for each text, those of the reference recording; None: the server's own."""

    texts: tuple[Text, ...]
    continuations: tuple[tuple[int, ...], ...] | None
    num_greedy: int
    top_k: int

    @property
    def num_tokens(self) -> int:
        """Returns the approximate number of tokens to compute, for the progress line."""
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


async def measure(scorer: Scorer, plan: Plan, on_text: OnText, about: dict[str, object]) -> Recording:
    """Measures a server. Raises ``ConfigError`` if a text is too long, ``ChoraleError`` if it fails."""
    needed = max(text.length for text in plan.texts) + plan.num_greedy + 1
    longest = await scorer.longest()
    if longest is not None and needed > longest:
        raise ConfigError(
            f"{scorer.where} takes at most {longest} tokens, and the longest text needs {needed} with its "
            "continuation: give shorter --lengths"
        )
    alone = []
    for text in plan.texts:
        alone.append(await scorer.score(text.token_ids, plan.num_greedy))
        on_text(text.length + plan.num_greedy)
    continuations = plan.continuations or tuple(one.greedy for one in alone)
    at_once = asyncio.Semaphore(max(1, min(REQUESTS_IN_FLIGHT, TOKENS_IN_FLIGHT // needed)))

    async def again(text: Text, continuation: tuple[int, ...]) -> Scores:
        async with at_once:
            answer = await scorer.score((*text.token_ids, *continuation), 1)
        on_text(text.length + plan.num_greedy)
        return answer.prompt

    crowd = await asyncio.gather(*map(again, plan.texts, continuations))
    readings = tuple(
        Reading(text, first.prompt, first.greedy, first.greedy_scores, continuation, second)
        for text, first, continuation, second in zip(plan.texts, alone, continuations, crowd, strict=True)
    )
    return Recording(readings, plan.top_k, about)
