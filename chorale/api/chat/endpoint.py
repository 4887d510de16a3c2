"""POST /v1/chat/completions: streams the events of a turn as chunks, or folds them into a body."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from chorale.api.answer import respond
from chorale.api.chat.body import ChatAnswer
from chorale.api.chat.prepare import prepare
from chorale.api.chat.request import parse_chat
from chorale.api.http.responses import read_as
from chorale.api.record import recorded
from chorale.api.state import ServerState, select_model


async def create(state: ServerState, request: Request) -> Response:
    chat = await read_as(request, state.config, parse_chat)
    chat.take_defaults(state.config)
    state, owner = select_model(state, chat.model), request.state.owner
    turn = recorded(await prepare(state, chat, owner), chat.include_record)
    return await respond(state, request, ChatAnswer.of(state, chat, [turn], owner=owner), stream=chat.stream)
