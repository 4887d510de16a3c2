"""Runs turns: the only place where endpoints meet the engine.

A turn is one or more *rounds*: a round is one generation. A choice returns what it needs next (``needs.py``):
another round, if the model ended without an answer (its final header is then forced) or after a built-in tool
has run (call and result are then part of the prompt, token by token, so the prefix cache covers all but the
result), a call to a tool, or a summary.

Errors before the first event raise (they become a JSON error with a status); later ones end every open choice
with ``TurnEnded(reason="error")``, with its items closed as incomplete. Closing the generator aborts the
engine's request.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar, Unpack

from chorale.client.base import EngineClient, TokenStream
from chorale.engine.types import GenerateRequest
from chorale.errors import ChoraleError, EngineError, QueueFullError
from chorale.harmony.vocab import Vocabulary
from chorale.tools.contract import ToolResult
from chorale.tracing.context import within
from chorale.turns.built_in.run_call import render_result, room_for_result, run_call
from chorale.turns.choice.choice import AnyChoice, Choice
from chorale.turns.choice.raw_choice import RawChoice, RawOptions
from chorale.turns.compaction import sampling_of_pass
from chorale.turns.direct import Direct
from chorale.turns.events import Fold, OutputEvent, end_error
from chorale.turns.merge import Sources
from chorale.turns.needs import CallTool, Compact, Ended, Need, NextRound
from chorale.turns.request import TurnRequest

ChoiceEvents = tuple[int, list[OutputEvent]]
Batches = AsyncGenerator[list[ChoiceEvents]]
Placed = AsyncGenerator[tuple[int, list[ChoiceEvents]]]
Steps = AsyncGenerator[list[ChoiceEvents] | Need]  # batches, finally the choice's next need
QUEUE_PATIENCE = 5.0  # seconds for which a turn after a tool retries a full queue

Either = TypeVar("Either", Choice, RawChoice)


@dataclass(frozen=True, slots=True)
class _Turn:
    """The state shared by the rounds of a turn. ``sources``: running generations and tool calls."""

    client: EngineClient
    vocab: Vocabulary
    request: TurnRequest
    direct: Direct | None = None
    sources: Sources[list[ChoiceEvents]] = field(default_factory=Sources)


async def run_turn(
    client: EngineClient, vocab: Vocabulary, request: TurnRequest
) -> AsyncGenerator[list[OutputEvent]]:
    """Runs one choice (``sampling.n`` must be 1). Yields the events of each wake-up, ``TurnEnded`` last."""
    async with aclosing(run_turns(client, vocab, request)) as turns:
        async for batch in turns:
            for _, events in batch:
                yield events


def run_turns(
    client: EngineClient, vocab: Vocabulary, request: TurnRequest, direct: Direct | None = None
) -> Batches:
    """Runs all ``sampling.n`` choices. Yields (choice index, events) of each wake-up.

    ``direct``: takes events of a single choice while it can.
    """
    eos = frozenset(client.info.eos_token_ids)
    choices = [Choice(vocab, request, index, eos) for index in range(request.sampling.n)]
    turn = _Turn(client, vocab, request, direct if len(choices) == 1 and not request.recorder else None)
    if turn.direct is not None:
        turn.direct.decode = choices[0].read
    first: Batches | None = _first_round(turn, choices, partial(_later_rounds, turn))
    for choice in choices:  # either all choices of a request need something first, or none
        if (need := choice.start()) is not None:
            turn.sources.add(_later_rounds(turn, choice, need))
            first = None
    return _drive(turn, choices, first)


def run_raw(
    client: EngineClient, vocab: Vocabulary, request: TurnRequest, **options: Unpack[RawOptions]
) -> Batches:
    """Runs a raw completion, which has one round."""
    eos = frozenset(client.info.eos_token_ids)
    choices = [RawChoice(vocab, request, index, eos, **options) for index in range(request.sampling.n)]
    turn = _Turn(client, vocab, request)
    return _drive(turn, choices, _first_round(turn, choices))


def run_together(client: EngineClient, turns: Sequence[tuple[TurnRequest, Batches]]) -> Placed:
    """Yields (position of a turn, events of its choices). Admits either all turns or none."""
    return _placed(0, turns[0][1]) if len(turns) == 1 else _run_several(client, turns)


async def _run_several(client: EngineClient, turns: Sequence[tuple[TurnRequest, Batches]]) -> Placed:
    num_choices = {request.request_id: request.sampling.n for request, _ in turns}
    sources: Sources[tuple[int, list[ChoiceEvents]]] = Sources()
    for position, (_, batches) in enumerate(turns):
        sources.add(_placed(position, batches))
    client.reserve(num_choices)
    try:
        async with aclosing(sources.read()) as found:
            async for placed in found:
                yield placed
    finally:
        client.release(num_choices)


async def fold_together(
    client: EngineClient, turns: Sequence[tuple[TurnRequest, Batches]]
) -> list[list[Fold]]:
    """Runs turns to their ends, as ``run_together``. Returns the choices of each."""
    folds = [[Fold() for _ in range(request.sampling.n)] for request, _ in turns]
    async with aclosing(run_together(client, turns)) as running:
        async for position, batch in running:
            for index, events in batch:
                folds[position][index].add(events)
    return folds


async def _placed(position: int, batches: Batches) -> Placed:
    async with aclosing(batches):
        async for batch in batches:
            yield position, batch


async def _drive(turn: _Turn, choices: Sequence[AnyChoice], first: Batches | None) -> Batches:
    """Reads every source of a turn until all have ended. Converts errors to events."""
    if first is not None and len(choices) > 1:
        turn.sources.add(first)
        first = None
    yielded = False
    try:
        if first is not None:  # a single choice is read directly
            async with aclosing(first):
                async for batch in first:
                    yielded = True
                    yield batch
        async with aclosing(turn.sources.read()) as batches:
            async for batch in batches:
                yielded = True
                yield batch
    except ChoraleError as error:
        if not yielded:
            raise
        for batch in turn.sources.unread():
            yield batch  # events already taken from their choices
        _fail(choices, error)
        yield _take(choices)
    finally:
        for tools in turn.request.tools:
            await tools.aclose()


async def _first_round(
    turn: _Turn, choices: Sequence[Either], continue_choice: Callable[[Either, Need], Batches] | None = None
) -> Batches:
    """Runs the round that all choices share; ``continue_choice`` continues a choice that needs something."""
    fed = dict(enumerate(choices))
    request, recorder = turn.request.first_round(), turn.request.recorder
    stream = turn.client.submit(request)
    batch: list[ChoiceEvents] = []
    begun = False
    if turn.direct is not None:
        stream.read_directly(turn.direct.read)
    try:
        async for chunks in stream:
            if turn.direct is not None and turn.direct.fault is not None:
                raise turn.direct.fault
            settled: dict[int, Need] = {}
            for chunk in chunks:
                choice = fed.get(chunk.index)  # the engine may not know yet that a choice has ended
                if choice is not None and recorder is not None:
                    recorder.add(request, chunk.index, chunk)
                need: Need | None = None if choice is None else choice.feed(chunk)
                if need is not None:
                    settled[chunk.index] = need
            batch = _take(fed.values())
            if not begun and any(chunk.token_ids for chunk in chunks):
                begun = True  # with the first token, visible or not
                batch = batch or [(index, []) for index in fed]
            if settled:
                for index, need in settled.items():
                    choice = fed.pop(index)
                    if continue_choice is not None and not isinstance(need, Ended):
                        turn.sources.add(continue_choice(choice, need))
                if not fed:
                    break  # closing the stream aborts the rest in the engine
                for index in settled:
                    stream.drop(index)  # a call may have ended without a stop token
            if batch:
                yield batch
        else:
            _fail(fed.values(), EngineError("the engine's stream ended early"))
            batch = _take(fed.values())
    finally:
        await stream.aclose()
    if batch:
        yield batch


async def _later_rounds(turn: _Turn, choice: Choice, need: Need) -> Batches:
    """Runs the later rounds of one choice, and its tools between them, until it has ended."""
    number = 0
    while not isinstance(need, Ended):
        match need:
            case CallTool():
                steps = _use_tool(turn, choice, need)
            case Compact():
                steps = _compact(turn, choice, need, number)
            case NextRound():
                steps = _next_round(turn, choice, need, number)
                number += 1
        async with aclosing(steps):
            async for step in steps:
                if isinstance(step, list):
                    yield step
                else:
                    need = step
    if batch := _take([choice]):
        yield batch


async def _next_round(turn: _Turn, choice: Choice, need: NextRound, number: int) -> Steps:
    info = turn.client.info
    request = turn.request.later_round(need, choice.index, number, info.max_model_len)
    patience = QUEUE_PATIENCE if need.num_new_tokens is not None else 0.0
    stream = await _submit(turn.client, request, patience) if request is not None else None
    if stream is None or request is None:
        yield choice.end("length")  # reported as incomplete; the output is kept
        return
    choice.begin_round(need)
    settled: Need | None = None
    try:
        async for chunks in stream:
            for chunk in chunks:
                if turn.request.recorder is not None:
                    turn.request.recorder.add(request, choice.index, chunk)
                settled = choice.feed(chunk)
            if settled is not None:
                break
            if batch := _take([choice]):
                yield batch
        else:
            settled = choice.fail(EngineError("the engine's stream ended early"))
    finally:
        await stream.aclose()
    yield settled


async def _submit(client: EngineClient, request: GenerateRequest, patience: float) -> TokenStream | None:
    """Submits a round. Returns None if the queue stays full for ``patience`` seconds."""
    deadline = time.monotonic() + patience
    while True:
        try:
            return client.submit(request)
        except QueueFullError:
            if time.monotonic() >= deadline:
                return None
            await asyncio.sleep(0.1)


async def _use_tool(turn: _Turn, choice: Choice, need: CallTool) -> Steps:
    """Runs a call to a built-in tool."""
    if batch := _take([choice]):
        yield batch
    result: ToolResult | None = None
    async with aclosing(run_call(turn.request.tools[choice.index], need)) as news:
        async for entry in news:
            if isinstance(entry, ToolResult):
                result = entry
            else:
                choice.tool_progressed(need, entry)
                yield _take([choice])
    assert result is not None
    room = room_for_result(need, turn.client.info.max_model_len)
    message = await asyncio.to_thread(render_result, need, result, turn.vocab, room)
    settled = choice.end("length") if message is None else choice.tool_done(need, result, message)
    if batch := _take([choice]):
        yield batch
    yield settled


async def _compact(turn: _Turn, choice: Choice, need: Compact, number: int) -> Steps:
    """Generates a summary of the conversation."""
    request, info = turn.request, turn.client.info
    compaction = request.compaction
    assert compaction is not None
    sampling = sampling_of_pass(request.sampling, info, len(need.prompt_token_ids))
    if sampling is None:
        yield choice.skip_compaction(need)
        return
    choice.compaction_progressed()
    yield _take([choice])
    summary = request.summary_round(need, f"{choice.index}.{number}.summary", sampling)
    fold, begun = Fold(), False
    with within("compact", {}, is_inner=True):
        async with aclosing(run_turn(turn.client, turn.vocab, summary)) as batches:
            async for events in batches:
                fold.add(events)
                if not begun and any(item.kind == "message" for item in fold.items):
                    begun = True
                    choice.compaction_progressed()
                    yield _take([choice])
    assert fold.ended is not None
    text = fold.text("message").strip()
    settled: Need
    if (error := end_error(fold.ended)) is not None:
        settled = choice.fail(error)
    elif not text:
        settled = choice.fail(EngineError("the model wrote no summary"))
    else:
        packed = compaction.pack(text)
        rebuilt = await asyncio.to_thread(compaction.rebuild, packed)
        settled = choice.compacted(need, packed, rebuilt, fold.ended.usage)
    if batch := _take([choice]):
        yield batch
    yield settled


def _take(choices: Iterable[AnyChoice]) -> list[ChoiceEvents]:
    return [(choice.index, events) for choice in choices if (events := choice.take())]


def _fail(choices: Iterable[AnyChoice], error: ChoraleError) -> None:
    for choice in choices:
        choice.fail(error)  # no effect on a choice that has ended
