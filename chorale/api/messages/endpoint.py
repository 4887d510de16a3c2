"""POST /v1/messages and /v1/messages/count_tokens. The middleware renders errors in Anthropic's form."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from chorale.api.http.offload import is_heavy
from chorale.api.http.responses import EventStream, json_response, large_response, read_as, until_disconnect
from chorale.api.messages.blocks import MessageAnswer, message_body
from chorale.api.messages.events import EventWriter, error_bytes
from chorale.api.messages.prepare import build_prompt, prepare
from chorale.api.messages.request import parse_count, parse_messages
from chorale.api.record import record_field
from chorale.api.state import ServerState, check_model, select_model
from chorale.tracing.context import name_response
from chorale.turns.request import TurnRequest
from chorale.turns.run import fold_together, run_turn, run_turns


async def create(state: ServerState, request: Request) -> Response:
    message = await read_as(request, state.config, parse_messages)
    state = select_model(state, message.model)
    turn = await prepare(state, message, request.state.owner)
    answer = MessageAnswer.of(state, message)
    name_response(answer.id)
    headers = {"request-id": request.state.request_id}
    if message.stream:
        return EventStream(_stream(state, turn, answer), headers, on_error=error_bytes)
    body = await until_disconnect(request, _complete(state, turn, answer))
    return await large_response(lambda: body, heavy=is_heavy(body), headers=headers)


async def count_tokens(state: ServerState, request: Request) -> Response:
    """Returns the length of the prompt for the same body."""
    message = await read_as(request, state.config, parse_count)
    check_model(state, message.model)
    prompt = await build_prompt(state, message)
    headers = {"request-id": request.state.request_id}
    return json_response({"input_tokens": len(prompt.token_ids)}, headers=headers)


async def _complete(state: ServerState, request: TurnRequest, answer: MessageAnswer) -> dict[str, Any]:
    """Returns the body. Raises the ``ChoraleError`` with which the turn ended."""
    running = run_turns(state.client, state.vocab, request)
    ((fold,),) = await fold_together(state.client, [(request, running)])
    if fold.ended is not None:
        state.metrics.repaired(fold.ended.repairs)
    return message_body(answer, fold) | record_field(state.client.info, [request])


async def _stream(state: ServerState, request: TurnRequest, answer: MessageAnswer) -> AsyncGenerator[bytes]:
    record = partial(record_field, state.client.info, [request])
    writer = EventWriter(answer, whole_calls=not request.sampling.grammar, record=record)
    async with aclosing(run_turn(state.client, state.vocab, request)) as turn:
        async for events in turn:
            data = writer.feed(events)
            if data:
                yield data
    if writer.ended is not None:
        state.metrics.repaired(writer.ended.repairs)
