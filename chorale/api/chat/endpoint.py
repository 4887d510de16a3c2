"""POST /v1/chat/completions: streams the events of a turn as chunks, or folds them into a body."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from chorale.api.chat.answer import Answer
from chorale.api.chat.body import chat_body, ended_chat
from chorale.api.chat.chunks import ChunkWriter
from chorale.api.chat.prepare import prepare
from chorale.api.chat.request import parse_chat
from chorale.api.chat.stored import keep
from chorale.api.http.offload import is_heavy
from chorale.api.http.responses import EventStream, large_response, read_as, until_disconnect
from chorale.api.http.sse import last_error
from chorale.api.logprobs import is_scored
from chorale.api.record import record_field, recorded
from chorale.api.state import ServerState, select_model
from chorale.tracing.context import name_response
from chorale.turns.direct import Direct
from chorale.turns.events import Fold, end_error
from chorale.turns.request import TurnRequest
from chorale.turns.run import fold_together, run_turns


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
    running = run_turns(state.client, state.vocab, turn)
    (folds,) = await fold_together(state.client, [(turn, running)])
    return await ended_chat(state, folds, turn, answer) | record_field(state.client.info, [turn])


async def stream_chat(
    state: ServerState, turn: TurnRequest, answer: Answer, owner: bytes, direct: Direct
) -> AsyncGenerator[bytes]:
    """Yields the chunks of each batch of events, an error event if a choice failed, and ``[DONE]`` last."""
    chat = answer.request
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
    for ended in ends:
        state.metrics.repaired(ended.repairs)
    yield answer.conclusion([ends], record_field(state.client.info, [turn]))
