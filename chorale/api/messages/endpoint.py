"""POST /v1/messages and /v1/messages/count_tokens. The middleware renders errors in Anthropic's form."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from chorale.api.answer import respond
from chorale.api.http.responses import json_response, read_as
from chorale.api.messages.events import MessageAnswer
from chorale.api.messages.prepare import build_prompt, prepare
from chorale.api.messages.request import parse_count, parse_messages
from chorale.api.state import ServerState, check_model, select_model


async def create(state: ServerState, request: Request) -> Response:
    message = await read_as(request, state.config, parse_messages)
    state = select_model(state, message.model)
    turn = await prepare(state, message, request.state.owner)
    answer = MessageAnswer((turn,), state.model_names[0], message.shows_thinking, message.omits_thinking)
    headers = {"request-id": request.state.request_id}
    return await respond(state, request, answer, stream=message.stream, headers=headers)


async def count_tokens(state: ServerState, request: Request) -> Response:
    """Returns the length of the prompt for the same body."""
    message = await read_as(request, state.config, parse_count)
    check_model(state, message.model)
    prompt = await build_prompt(state, message)
    headers = {"request-id": request.state.request_id}
    return json_response({"input_tokens": len(prompt.token_ids)}, headers=headers)
