"""POST /v1/chat/completions: streams the events of a turn as chunks, or folds them into a body."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from chorale.api.chat.answer import CHUNK, Answer
from chorale.api.chat.body import chat_body
from chorale.api.chat.chunks import ChunkWriter
from chorale.api.chat.prepare import prepare
from chorale.api.chat.request import parse_chat
from chorale.api.chat.stored import keep
from chorale.api.fields import wants_usage
from chorale.api.http.offload import beside, is_heavy
from chorale.api.http.responses import EventStream, large_response, read_as, until_disconnect
from chorale.api.http.sse import DONE, event, last_error
from chorale.api.logprobs import is_scored
from chorale.api.record import record_field, recorded
from chorale.api.state import ServerState, select_model
from chorale.api.usage import closing_fields
from chorale.tracing.context import name_response
from chorale.turns.direct import Direct
from chorale.turns.events import Fold, TurnEnded, end_error
from chorale.turns.request import TurnRequest
from chorale.turns.run import run_turns


async def create(state: ServerState, request: Request) -> Response:
    chat = await read_as(request, state.config, parse_chat)
    chat.take_defaults(state.config)
    state = select_model(state, chat.model)
    turn = recorded(await prepare(state, chat, request.state.owner), chat.include_record)
    answer = Answer.of(state, chat)
    name_response(answer.id)
    if chat.stream:
        source = partial(stream_chat, state, turn, answer, request.state.owner)
        return EventStream(source, on_error=last_error)
    body = await until_disconnect(request, complete_chat(state, turn, answer))
    if chat.store:
        await keep(state, chat, body, request.state.owner)
    return await large_response(lambda: body, heavy=is_scored(turn.sampling) or is_heavy(body))


async def complete_chat(state: ServerState, turn: TurnRequest, answer: Answer) -> dict[str, Any]:
    """Returns the body. Raises the ``ChoraleError`` with which the turn ended."""
    folds = [Fold() for _ in range(turn.sampling.n)]
    turns = run_turns(state.client, state.vocab, turn)
    async with aclosing(turns):
        async for batch in turns:
            for index, events in batch:
                folds[index].add(events)
    return await ended_chat(state, folds, turn, answer) | record_field(state.client.info, [turn])


async def ended_chat(
    state: ServerState, folds: Sequence[Fold], turn: TurnRequest, answer: Answer
) -> dict[str, Any]:
    """Returns the body of a chat whose choices have ended. Raises the ``ChoraleError`` of one that failed."""
    for fold in folds:
        if fold.ended is not None:
            state.metrics.repaired(fold.ended.repairs)
    scored = is_scored(turn.sampling)
    return await beside(lambda: chat_body(answer, folds, turn), heavy=scored)


async def stream_chat(
    state: ServerState, turn: TurnRequest, answer: Answer, owner: bytes, direct: Direct
) -> AsyncGenerator[bytes]:
    """Yields the chunks of each batch of events, an error event if a choice failed, and ``[DONE]`` last."""
    chat = answer.chat
    folds = [Fold() for _ in range(chat.n if chat.store else 0)]
    writers = [ChunkWriter(answer, turn, index) for index in range(chat.n)]
    # Start all choices in order at once: OpenAI's SDK lists them in the order of their first chunks.
    opening = b"".join([writer.feed(()) for writer in writers])
    direct.encode = writers[0].feed
    turns = run_turns(state.client, state.vocab, turn, None if folds else direct)
    async with aclosing(turns):
        async for batch in turns:
            if len(batch) == 1:
                data = writers[batch[0][0]].feed(batch[0][1])
            else:
                data = b"".join([writers[index].feed(events) for index, events in batch])
            if opening:
                data, opening = opening + data, b""
            if data:
                yield data
            if folds:
                for index, events in batch:
                    folds[index].add(events)
    if folds and all(writer.ended and end_error(writer.ended) is None for writer in writers):
        await keep(state, chat, chat_body(answer, folds, turn), owner)
    ends = [writer.ended for writer in writers if writer.ended is not None]
    yield _conclusion(state, ends, turn, answer)


def _conclusion(state: ServerState, ends: list[TurnEnded], turn: TurnRequest, answer: Answer) -> bytes:
    """Returns the end of the stream: a chunk with usage or record, if any, and ``[DONE]``; or an error."""
    for ended in ends:
        state.metrics.repaired(ended.repairs)
    error = next((error for ended in ends if (error := end_error(ended)) is not None), None)
    if error is not None:
        return last_error(error)
    closing = (
        closing_fields([ends], metrics=answer.metrics) if wants_usage(answer.chat.stream_options) else {}
    )
    closing |= record_field(state.client.info, [turn])
    return event(answer.completion(CHUNK, []) | closing) + DONE if closing else DONE
