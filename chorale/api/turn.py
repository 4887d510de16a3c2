"""run_turn: one prompt to a finished turn, as OutputEvents. The only place where endpoints meet the engine.

A turn is one or more *rounds*: a round is one generation. A choice asks for another round when the model
ended without an answer (its final header is then forced); tool loops will ask for one after a tool ran.

Errors before the first event raise (they become a JSON error with a status); after it they end every open
choice with ``TurnEnded(reason="error")``, its items closed as incomplete. Closing the generator aborts the
engine's request.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import AsyncGenerator, Iterable, Sequence
from typing import Protocol

import msgspec

from chorale.api.choice import Choice
from chorale.api.options import Round, TurnOptions
from chorale.api.output import EndReason, OutputEvent
from chorale.client.base import EngineClient, TokenStream
from chorale.engine.types import GenerateRequest, SamplingSpec, TokenChunk
from chorale.errors import ChoraleError, EngineError, QueueFullError
from chorale.harmony.vocab import Vocabulary

__all__ = ["ChoiceEvents", "Round", "TurnChoice", "TurnOptions", "drive", "run_turn", "run_turns"]

ChoiceEvents = tuple[int, list[OutputEvent]]


class TurnChoice(Protocol):
    """What ``drive`` needs of a choice: ``Choice`` (harmony) is one, raw completions have another."""

    index: int
    ended: bool
    next_round: Round | None
    num_rounds: int
    sampled: list[int]

    def feed(self, chunk: TokenChunk) -> bool:
        """Take in new tokens. True: this choice has ended, or asks for its next round."""
        ...

    def take(self) -> list[OutputEvent]: ...

    def begin_round(self, following: Round) -> None: ...

    def end(self, reason: EndReason, stop_reason: str | int | None = None) -> None: ...

    def fail(self, error: ChoraleError) -> None: ...


Feed = tuple[TokenStream, dict[int, TurnChoice]]  # a stream, and the choice behind each of its indices


async def run_turn(
    client: EngineClient,
    vocab: Vocabulary,
    *,
    prompt_token_ids: list[int],
    sampling: SamplingSpec,
    options: TurnOptions,
) -> AsyncGenerator[list[OutputEvent]]:
    """One choice (``sampling.n`` must be 1): the events of each wake-up, ``TurnEnded`` last."""
    turns = run_turns(client, vocab, prompt_token_ids=prompt_token_ids, sampling=sampling, options=options)
    try:
        async for batch in turns:
            for _, events in batch:
                yield events
    finally:
        await turns.aclose()


def run_turns(
    client: EngineClient,
    vocab: Vocabulary,
    *,
    prompt_token_ids: list[int],
    sampling: SamplingSpec,
    options: TurnOptions,
) -> AsyncGenerator[list[ChoiceEvents]]:
    """All ``sampling.n`` choices of one request: (choice index, events) of each wake-up."""
    eos = frozenset(client.info.eos_token_ids)
    choices = [Choice(vocab, options, index, prompt_token_ids, eos) for index in range(sampling.n)]
    return drive(client, choices, prompt_token_ids, sampling, options)


async def drive(
    client: EngineClient,
    choices: Sequence[TurnChoice],
    prompt_token_ids: list[int],
    sampling: SamplingSpec,
    options: TurnOptions,
) -> AsyncGenerator[list[ChoiceEvents]]:
    """Submit the request and feed its choices, round after round, until each has ended."""
    request = _request(options.request_id, prompt_token_ids, sampling, options)
    streams: deque[Feed] = deque([(client.submit(request), dict(enumerate(choices)))])
    yielded = False
    try:
        while streams:
            stream, fed = streams[0]
            async for chunks in stream:
                settled = False
                for chunk in chunks:
                    settled |= fed[chunk.index].feed(chunk)
                batch = _take(fed.values())
                if settled:
                    streams.extend(_next_rounds(client, fed, sampling, options))
                done = settled and _drop_ended(stream, fed)
                if batch:
                    yielded = True
                    yield batch
                if done:
                    break  # closing the stream aborts whatever the engine still does for it
            await stream.aclose()
            streams.popleft()
            _fail(fed.values(), EngineError("the engine's stream ended early"))
            if batch := _take(fed.values()):
                yielded = True
                yield batch
    except ChoraleError as error:
        if not yielded:
            raise
        _fail(choices, error)
        yield _take(choices)
    finally:
        for stream, _ in streams:
            await stream.aclose()


def _take(choices: Iterable[TurnChoice]) -> list[ChoiceEvents]:
    return [(choice.index, events) for choice in choices if (events := choice.take())]


def _drop_ended(stream: TokenStream, fed: dict[int, TurnChoice]) -> bool:
    """Whether all have ended. If not, the engine need not go on with those that a stop string ended."""
    ended = [key for key, choice in fed.items() if choice.ended]
    if len(ended) == len(fed):
        return True
    for key in ended:
        stream.drop(key)
    return False


def _fail(choices: Iterable[TurnChoice], error: ChoraleError) -> None:
    for choice in choices:
        choice.fail(error)  # nothing happens to a choice that has ended


def _next_rounds(
    client: EngineClient, fed: dict[int, TurnChoice], sampling: SamplingSpec, options: TurnOptions
) -> list[Feed]:
    """Submit the rounds that choices ask for, and move those choices out of ``fed``."""
    waiting = [key for key, choice in fed.items() if choice.next_round is not None]
    return [submitted for key in waiting if (submitted := _submit_next(client, fed, key, sampling, options))]


def _submit_next(
    client: EngineClient, fed: dict[int, TurnChoice], key: int, sampling: SamplingSpec, options: TurnOptions
) -> Feed | None:
    choice = fed[key]
    following = choice.next_round
    assert following is not None
    prompt = following.prompt_token_ids
    budget = client.info.max_model_len - len(prompt)
    num_sampled = len(choice.sampled)
    if sampling.max_tokens is not None:
        budget = min(budget, sampling.max_tokens - num_sampled)
    if budget < 1:
        choice.end("length")
        return None
    spec = msgspec.structs.replace(
        sampling,
        n=1,
        max_tokens=budget,
        min_tokens=max(0, min(sampling.min_tokens - num_sampled, budget)),
        seed=None if sampling.seed is None else sampling.seed + choice.index,
        prompt_logprobs=None,
        grammar_context=following.num_own_tokens if sampling.grammar else 0,
    )
    request_id = f"{options.request_id}.{choice.index}.{choice.num_rounds}"
    try:
        stream = client.submit(_request(request_id, prompt, spec, options))
    except QueueFullError:
        choice.end("length")  # incomplete, and says so; what was produced is kept
        return None
    del fed[key]
    choice.begin_round(following)
    return stream, {0: choice}


def _request(
    request_id: str, prompt: list[int], sampling: SamplingSpec, options: TurnOptions
) -> GenerateRequest:
    return GenerateRequest(
        request_id=request_id,
        prompt_token_ids=prompt,
        sampling=sampling,
        priority=options.priority,
        arrival_time=options.arrival_time or time.time(),
        cache_salt=options.cache_salt,
    )
