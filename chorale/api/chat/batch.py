"""POST /v1/chat/completions/batch, vLLM's: several conversations in one request, one choice for each."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Annotated, Any

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from chorale.api import limits
from chorale.api.chat.answer import Answer
from chorale.api.chat.body import ended_chat
from chorale.api.chat.prepare import prepare
from chorale.api.chat.request import ChatRequest, parse_chat
from chorale.api.http.responses import large_response, read_as, until_disconnect
from chorale.api.record import record_field, recorded
from chorale.api.state import ServerState, select_model
from chorale.api.usage import NO_METRICS, closing_fields
from chorale.errors import invalid, unsupported
from chorale.requests.readers import within
from chorale.tracing.context import name_response
from chorale.turns.request import TurnRequest
from chorale.turns.run import fold_together, run_turns

# Fields of a chat that a batch cannot have. ``n`` must be 1.
_REFUSED = ("stream", "tools", "functions", "web_search_options", "store", "prompt_logprobs")
_Conversation = Annotated[list[dict[str, Any]], Field(min_length=1), limits.items("messages")]


class BatchChatRequest(ChatRequest):
    """The fields of a chat, with a list of conversations."""

    messages: Annotated[  # type: ignore[assignment]
        list[_Conversation], Field(min_length=1), limits.items("prompts")
    ]


def parse_batch(data: Mapping[str, Any]) -> list[ChatRequest]:
    """Returns a chat for each conversation. Raises ``RequestError`` with the path of the faulty field."""
    conversations = data.get("messages")
    if not isinstance(conversations, list) or not 1 <= len(conversations) <= limits.SIZES["prompts"].max:
        raise invalid("messages", f"must be a list of 1 to {limits.SIZES['prompts'].max} conversations")
    chats = []
    for position, messages in enumerate(conversations):
        with _placed(position):
            chats.append(parse_chat({**data, "messages": messages}))
    for name in _REFUSED:
        if getattr(chats[0], name):
            raise unsupported(name, "is not available in a batch")
    if chats[0].n != 1:
        raise unsupported("n", "must be 1 in a batch")
    return chats


def _placed(position: int) -> AbstractContextManager[None]:
    """Adds the conversation to the path of a message."""
    return within(lambda param: re.sub("^messages", f"messages[{position}]", param))


async def create_batch(state: ServerState, request: Request) -> Response:
    chats = await read_as(request, state.config, parse_batch)
    state = select_model(state, chats[0].model)
    turns = []
    for position, chat in enumerate(chats):
        chat.take_defaults(state.config)
        with _placed(position):
            turns.append(recorded(await prepare(state, chat, request.state.owner), chat.include_record))
    answer = Answer.of(state, chats[0])
    name_response(answer.id)
    body = await until_disconnect(request, _complete(state, turns, answer))
    return await large_response(lambda: body, heavy=True)


async def _complete(state: ServerState, turns: list[TurnRequest], answer: Answer) -> dict[str, Any]:
    """Returns the body. Raises the ``ChoraleError`` with which a turn ended."""
    running = [(turn, run_turns(state.client, state.vocab, turn)) for turn in turns]
    chats = await fold_together(state.client, running)
    bodies = [await ended_chat(state, folds, turn, answer) for folds, turn in zip(chats, turns, strict=True)]
    choices = [{**body["choices"][0], "index": position} for position, body in enumerate(bodies)]
    ends = [[fold.result() for fold in folds] for folds in chats]
    closing = closing_fields(ends, metrics=NO_METRICS) | record_field(state.client.info, turns)
    return answer.object("chat.completion", choices) | closing
