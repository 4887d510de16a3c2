"""Chat Completions: request model, conversion of messages to harmony, chunks and body."""

from __future__ import annotations

from functools import partial

from starlette.routing import Route

from chorale.api.chat import stored
from chorale.api.chat.batch import create_batch
from chorale.api.chat.endpoint import create
from chorale.api.state import ServerState

__all__ = ["create", "routes"]

_PATH = "/v1/chat/completions"


def routes(state: ServerState) -> list[Route]:
    one = f"{_PATH}/{{completion_id}}"
    return [
        Route(_PATH, partial(create, state), methods=["POST"]),
        Route(f"{_PATH}/batch", partial(create_batch, state), methods=["POST"]),
        Route(_PATH, partial(stored.list_completions, state), methods=["GET"]),
        Route(one, partial(stored.retrieve, state), methods=["GET"]),
        Route(one, partial(stored.update, state), methods=["POST"]),
        Route(one, partial(stored.delete, state), methods=["DELETE"]),
        Route(f"{one}/messages", partial(stored.list_messages, state), methods=["GET"]),
    ]
