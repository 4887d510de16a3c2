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
from chorale.api.answer import Folds, respond
from chorale.api.chat.body import ChatAnswer, choice
from chorale.api.chat.prepare import prepare
from chorale.api.chat.request import ChatRequest, parse_chat
from chorale.api.http.responses import read_as
from chorale.api.record import recorded
from chorale.api.state import ServerState, select_model
from chorale.api.usage import NO_METRICS, closing_fields
from chorale.errors import invalid, unsupported
from chorale.requests.readers import within

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


class BatchAnswer(ChatAnswer):
    """One body with the first choice of each chat."""

    def body(self, folds: Folds) -> dict[str, Any]:
        ends = [[fold.result() for fold in row] for row in folds]
        found = zip(self.turns, folds, strict=True)
        choices = [choice(self, turn, position, row[0]) for position, (turn, row) in enumerate(found)]
        return self.object("chat.completion", choices) | closing_fields(ends, metrics=NO_METRICS)


async def create_batch(state: ServerState, request: Request) -> Response:
    chats = await read_as(request, state.config, parse_batch)
    state = select_model(state, chats[0].model)
    turns = []
    for position, chat in enumerate(chats):
        chat.take_defaults(state.config)
        with _placed(position):
            turns.append(recorded(await prepare(state, chat, request.state.owner), chat.include_record))
    return await respond(state, request, BatchAnswer.of(state, chats[0], turns))
