"""run_turn: one prompt to a finished turn, as OutputEvents. The only place where endpoints meet the engine.

A turn is one or more *rounds*: a round is one generation. A choice asks for another round when the model
ended without an answer (its final header is then forced), and after a tool of the server has run: the call
and its result are then part of the prompt, token by token, so that the prefix cache has all but the result.

Errors before the first event raise (they become a JSON error with a status); after it they end every open
choice with ``TurnEnded(reason="error")``, its items closed as incomplete. Closing the generator aborts the
engine's request.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from chorale.client.base import EngineClient, TokenStream
from chorale.engine.types import GenerateRequest, SamplingSpec, TokenChunk
from chorale.errors import ChoraleError, EngineError, QueueFullError
from chorale.harmony.vocab import Vocabulary
from chorale.turns.choice import Choice
from chorale.turns.compaction import options_of_pass, sampling_of_pass
from chorale.turns.events import EndReason, Fold, OutputEvent, end_error
from chorale.turns.merge import Sources
from chorale.turns.options import Round, TurnOptions
from chorale.turns.tools.loop import ANSWER_TOKENS, render_result, run_call

__all__ = ["ChoiceEvents", "Round", "TurnChoice", "TurnOptions", "drive", "run_turn", "run_turns"]

ChoiceEvents = tuple[int, list[OutputEvent]]
QUEUE_PATIENCE = 5.0  # seconds for which a turn whose tool has run tries to get back into a full queue


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
    job = _Job(client, sampling, options)
    first = _first_round(job, choices, prompt_token_ids)
    if any(_goes_on(choice) for choice in choices):
        for choice in choices:
            job.sources.add(_go_on(job, choice))
    elif len(choices) > 1:
        job.sources.add(first)
    yielded = False
    try:
        if not job.sources:  # one choice is read without anything between
            async with aclosing(first):
                async for batch in first:
                    yielded = True
                    yield batch
        async with aclosing(job.sources.read()) as batches:
            async for batch in batches:
                yielded = True
                yield batch
    except ChoraleError as error:
        if not yielded:
            raise
        for batch in job.sources.unread():
            yield batch  # of events that their choices have given away already
        _fail(choices, error)
        yield _take(choices)
    finally:
        for tools in options.tools:
            await tools.aclose()


@dataclass(frozen=True, slots=True)
class _Job:
    """What the rounds of a request share. ``sources``: what is being generated, or run, at this moment."""

    client: EngineClient
    sampling: SamplingSpec
    options: TurnOptions
    sources: Sources[list[ChoiceEvents]] = field(default_factory=Sources)


async def _first_round(
    job: _Job, choices: Sequence[TurnChoice], prompt: list[int]
) -> AsyncGenerator[list[ChoiceEvents]]:
    """The round that all choices have in common. Those that go on become sources of their own."""
    fed = dict(enumerate(choices))
    stream = job.client.submit(_request(job.options.request_id, prompt, job.sampling, job.options))
    try:
        async for chunks in stream:
            settled = False
            for chunk in chunks:
                settled |= fed[chunk.index].feed(chunk)
            batch = _take(fed.values())
            if settled and _is_over(stream, fed):
                break  # closing the stream aborts whatever the engine still does for it
            if settled:
                for choice in _split_off(stream, fed):
                    job.sources.add(_go_on(job, choice))
            if batch:
                yield batch
        else:
            _fail(fed.values(), EngineError("the engine's stream ended early"))
            batch = _take(fed.values())
    finally:
        await stream.aclose()
    if batch:
        yield batch
    for choice in fed.values():
        if not choice.ended:
            job.sources.add(_go_on(job, choice))


async def _go_on(job: _Job, choice: TurnChoice) -> AsyncGenerator[list[ChoiceEvents]]:
    """The later rounds of one choice, and its tools between them, until it has ended."""
    spec = job.sampling
    while not choice.ended:
        if isinstance(choice, Choice) and choice.tool_call is not None:
            async with aclosing(_use_tool(job, choice)) as batches:
                async for batch in batches:
                    yield batch
            continue
        following = choice.next_round
        assert following is not None
        if isinstance(choice, Choice) and choice.compaction_due(following):
            async with aclosing(_compact(job, choice, following)) as batches:
                async for batch in batches:
                    yield batch
            continue
        spec = _next_spec(job, choice, following, spec)
        stream = await _submit_next(job, choice, following, spec)
        if stream is None:
            break
        choice.begin_round(following)
        try:
            async for chunks in stream:
                settled = False
                for chunk in chunks:
                    settled |= choice.feed(chunk)
                if settled:
                    break
                if batch := _take([choice]):
                    yield batch
            else:
                choice.fail(EngineError("the engine's stream ended early"))
        finally:
            await stream.aclose()
    if batch := _take([choice]):
        yield batch


async def _use_tool(job: _Job, choice: Choice) -> AsyncGenerator[list[ChoiceEvents]]:
    """Run the call that ``choice`` waits for. Its next round is set then, or the choice has ended."""
    call, tools = choice.tool_call, choice.tools
    assert call is not None
    assert tools is not None
    limit = job.sampling.max_tokens
    if limit is not None and len(choice.sampled) >= limit:
        choice.end("length")  # nothing could be said about a result
        return
    if batch := _take([choice]):
        yield batch
    async with aclosing(run_call(tools, call)) as news:
        async for progress in news:
            choice.on_progress(progress)
            yield _take([choice])
    window = job.client.info.max_model_len
    room = window - len(choice.prompt_with_call) - min(ANSWER_TOKENS, window // 4)
    result = await asyncio.to_thread(render_result, call, choice.vocab, room)
    if result is None:
        choice.end("length")
    else:
        choice.end_call(result)
    if batch := _take([choice]):
        yield batch


async def _compact(job: _Job, choice: Choice, following: Round) -> AsyncGenerator[list[ChoiceEvents]]:
    """The model sums up what it would have read; its next round is set then, or the choice has ended."""
    compaction = job.options.compaction
    assert compaction is not None
    prompt = compaction.prompt_of_pass(following.prompt_token_ids, is_first=following.num_new_tokens is None)
    sampling = sampling_of_pass(job.sampling, job.client.info, len(prompt))
    if sampling is None:
        choice.skip_compaction()
        return
    choice.begin_compaction()
    yield _take([choice])
    fold, begun = Fold(), False
    options = options_of_pass(job.options, f"{choice.index}.{choice.num_rounds}.summary")
    turn = run_turn(job.client, choice.vocab, prompt_token_ids=prompt, sampling=sampling, options=options)
    async with aclosing(turn):
        async for events in turn:
            fold.add(events)
            if not begun and any(item.kind == "message" for item in fold.items):
                begun = True
                choice.on_summary_begun()
                yield _take([choice])
    assert fold.ended is not None
    summary = fold.text("message").strip()
    if (error := end_error(fold.ended)) is not None:
        choice.fail(error)
    elif not summary:
        choice.fail(EngineError("the model wrote no summary"))
    else:
        packed = compaction.pack(summary)
        rebuilt = await asyncio.to_thread(compaction.rebuild, packed)
        choice.end_compaction(following, packed, rebuilt, fold.ended.usage)
    if batch := _take([choice]):
        yield batch


def _waits_for_tool(choice: TurnChoice) -> bool:
    return isinstance(choice, Choice) and choice.tool_call is not None


def _goes_on(choice: TurnChoice) -> bool:
    return choice.next_round is not None or _waits_for_tool(choice)


def _take(choices: Iterable[TurnChoice]) -> list[ChoiceEvents]:
    return [(choice.index, events) for choice in choices if (events := choice.take())]


def _is_over(stream: TokenStream, fed: dict[int, TurnChoice]) -> bool:
    """Whether all have settled. If not, the engine need not go on with those that have ended."""
    ended = [key for key, choice in fed.items() if choice.ended]
    if all(choice.ended or _goes_on(choice) for choice in fed.values()):
        return True
    for key in ended:
        stream.drop(key)
    return False


def _split_off(stream: TokenStream, fed: dict[int, TurnChoice]) -> list[TurnChoice]:
    """Take those that go on out of ``fed``."""
    keys = [key for key, choice in fed.items() if _goes_on(choice)]
    for key in keys:
        stream.drop(key)  # a tool's call may have ended without a stop token
    return [fed.pop(key) for key in keys]


def _fail(choices: Iterable[TurnChoice], error: ChoraleError) -> None:
    for choice in choices:
        choice.fail(error)  # nothing happens to a choice that has ended


def _next_spec(job: _Job, choice: TurnChoice, following: Round, spec: SamplingSpec) -> SamplingSpec:
    """How the next round samples. ``spec``: of the round before."""
    first = job.sampling
    num_sampled = len(choice.sampled)
    budget = job.client.info.max_model_len - len(following.prompt_token_ids)
    if first.max_tokens is not None:
        budget = min(budget, first.max_tokens - num_sampled)
    grammar = spec.grammar
    if following.num_new_tokens is not None and isinstance(choice, Choice) and choice.tools is not None:
        grammar = choice.later_grammar(first.max_tokens)
    return msgspec.structs.replace(
        first,
        n=1,
        max_tokens=budget,
        min_tokens=max(0, min(first.min_tokens - num_sampled, budget)),
        seed=None if first.seed is None else first.seed + choice.index,
        prompt_logprobs=None,
        grammar=grammar,
        grammar_context=following.num_own_tokens if grammar else 0,
    )


async def _submit_next(
    job: _Job, choice: TurnChoice, following: Round, spec: SamplingSpec
) -> TokenStream | None:
    """None: the choice has ended, because there is no room or no place for another round."""
    if spec.max_tokens is not None and spec.max_tokens < 1:
        choice.end("length")
        return None
    request_id = f"{job.options.request_id}.{choice.index}.{choice.num_rounds}"
    request = _request(request_id, following.prompt_token_ids, spec, job.options)
    patience = QUEUE_PATIENCE if following.num_new_tokens is not None else 0.0
    deadline = time.monotonic() + patience
    while True:
        try:
            return job.client.submit(request)
        except QueueFullError:
            if time.monotonic() >= deadline:
                choice.end("length")  # incomplete, and says so; what was produced is kept
                return None
            await asyncio.sleep(0.1)


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
