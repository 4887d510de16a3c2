"""/openapi.json, made of the request models. ``docs`` is the page that shows it.

``operations`` is the list of what is served; a test holds it against the routes. Both are off with
--disable-fastapi-docs.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from functools import partial
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from chorale.api.chat.request import ChatRequest
from chorale.api.chat.stored import MetadataUpdate
from chorale.api.completions.request import CompletionRequest
from chorale.api.conversations.request import CreateConversation, CreateItems, UpdateConversation
from chorale.api.http.responses import json_response
from chorale.api.messages.request import CountRequest, MessagesRequest
from chorale.api.operator.tokenize import DetokenizeRequest, TokenizeRequest
from chorale.api.responses.compact import CompactRequest
from chorale.api.responses.request import ResponsesRequest
from chorale.api.state import ServerState
from chorale.version import __version__

_CONVERSATION = "/v1/conversations/{conversation_id}"
_REF = "#/components/schemas/{model}"


@dataclass(frozen=True, slots=True)
class Operation:
    method: str
    path: str
    summary: str
    body: type[BaseModel] | None = None
    streams: bool = False

    @property
    def example(self) -> dict[str, Any] | None:
        """A body that works as it stands, where there is one."""
        return _EXAMPLES.get(self.path)


_QUESTION = [{"role": "user", "content": "What is 17 + 25?"}]
_EXAMPLES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": _QUESTION},
    "/v1/completions": {"prompt": "One, two,", "max_tokens": 8},
    "/v1/messages": {"max_tokens": 200, "messages": _QUESTION},
    "/v1/messages/count_tokens": {"messages": _QUESTION},
    "/v1/responses": {"input": "What is 17 + 25?"},
    "/v1/responses/input_tokens": {"input": "What is 17 + 25?"},
    "/v1/responses/compact": {"input": _QUESTION},
    "/v1/conversations": {"metadata": {"topic": "sums"}},
    _CONVERSATION: {"metadata": {"topic": "lists"}},
    f"{_CONVERSATION}/items": {"items": [{"type": "message", "role": "user", "content": "Hello."}]},
    "/tokenize": {"prompt": "What is 17 + 25?"},
    "/detokenize": {"tokens": [4827, 382, 220, 1422]},
}
_TAGS = {
    "/v1/chat": "Chat Completions",
    "/v1/completions": "Completions",
    "/v1/messages": "Messages",
    "/v1/responses": "Responses",
    "/v1/conversations": "Conversations",
    "/v1/models": "Models",
}


def operations() -> tuple[Operation, ...]:
    """Everything that is served."""
    return (
        Operation("POST", "/v1/chat/completions", "A chat's next message", ChatRequest, streams=True),
        Operation("GET", "/v1/chat/completions", "The stored ones"),
        Operation("GET", "/v1/chat/completions/{completion_id}", "One that was asked to be stored"),
        Operation("POST", "/v1/chat/completions/{completion_id}", "Change its metadata", MetadataUpdate),
        Operation("DELETE", "/v1/chat/completions/{completion_id}", "Forget it"),
        Operation("GET", "/v1/chat/completions/{completion_id}/messages", "What it was asked"),
        Operation("POST", "/v1/completions", "A raw prompt's continuation", CompletionRequest, streams=True),
        Operation(
            "POST",
            "/v1/messages",
            "A chat's next message, in Anthropic's form",
            MessagesRequest,
            streams=True,
        ),
        Operation("POST", "/v1/messages/count_tokens", "How long its prompt is", CountRequest),
        Operation(
            "POST",
            "/v1/responses",
            "A response; over a WebSocket, with GET and an upgrade, any number of them",
            ResponsesRequest,
            streams=True,
        ),
        Operation("POST", "/v1/responses/input_tokens", "How long its prompt is", ResponsesRequest),
        Operation("POST", "/v1/responses/compact", "A conversation summarized", CompactRequest),
        Operation("GET", "/v1/responses/{response_id}", "A stored response, or its events from any one on"),
        Operation("DELETE", "/v1/responses/{response_id}", "Forget it"),
        Operation("POST", "/v1/responses/{response_id}/cancel", "Stop it, if it runs in the background"),
        Operation("GET", "/v1/responses/{response_id}/input_items", "What it was asked"),
        Operation("POST", "/v1/conversations", "A conversation", CreateConversation),
        Operation("GET", f"{_CONVERSATION}", "It and its metadata"),
        Operation("POST", f"{_CONVERSATION}", "Give it other metadata", UpdateConversation),
        Operation("DELETE", f"{_CONVERSATION}", "Forget it and its items"),
        Operation("GET", f"{_CONVERSATION}/items", "Its items, in pages"),
        Operation("POST", f"{_CONVERSATION}/items", "Add items to it", CreateItems),
        Operation("GET", f"{_CONVERSATION}/items/{{item_id}}", "One of its items"),
        Operation("DELETE", f"{_CONVERSATION}/items/{{item_id}}", "Take one out"),
        Operation("POST", "/invocations", "Chat, completion or response, by the body (SageMaker)"),
        Operation("GET", "/v1/models", "The names that this server answers to"),
        Operation("GET", "/v1/models/{model}", "One of them"),
        Operation("POST", "/tokenize", "A prompt or a chat in tokens", TokenizeRequest),
        Operation("POST", "/detokenize", "Tokens as text", DetokenizeRequest),
        Operation("GET", "/health", "200 while the engine serves, else 503 and why"),
        Operation("GET", "/ready", "As /health, but 503 while the server drains"),
        Operation("GET", "/ping", "As /health"),
        Operation("POST", "/ping", "As /health"),
        Operation("GET", "/version", "The version of this server"),
        Operation("GET", "/load", "Requests being answered"),
        Operation("GET", "/metrics", "Prometheus metrics"),
    )


def routes(state: ServerState) -> list[Route]:
    if state.config.disable_docs:
        return []
    return [Route("/openapi.json", partial(_openapi, state))]


async def _openapi(state: ServerState, request: Request) -> Response:
    return json_response(describe(state.config.root_path.rstrip("/") or "/", state.model_names[0]))


@functools.cache
def describe(server: str = "/", model: str = "gpt-oss-20b") -> dict[str, Any]:
    """The OpenAPI 3.1 document, made when it is first asked for (a tenth of a second). Not to be changed.

    ``server``: the path in front of all others; ``model``: the name in examples.
    """
    listed = operations()
    bodies = sorted({op.body for op in listed if op.body is not None}, key=lambda model: model.__name__)
    _, schemas = models_json_schema([(model, "validation") for model in bodies], ref_template=_REF)
    paths: dict[str, dict[str, Any]] = {}
    for operation in listed:
        paths.setdefault(operation.path, {})[operation.method.lower()] = _describe(operation, model)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Chorale", "version": __version__},
        "servers": [{"url": server}],
        "paths": paths,
        "components": {
            "schemas": {**schemas.get("$defs", {}), "Error": _ERROR},
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"bearer": []}],
    }


_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


def _describe(operation: Operation, model: str) -> dict[str, Any]:
    name = "".join(part for part in operation.path.title() if part.isalnum())
    content: dict[str, Any] = {"application/json": {}}
    if operation.streams:
        content["text/event-stream"] = {}
    found: dict[str, Any] = {
        "summary": operation.summary,
        "tags": [next((tag for start, tag in _TAGS.items() if operation.path.startswith(start)), "Server")],
        "operationId": f"{operation.method.lower()}{name}",
        "responses": {
            "200": {"description": "The answer", "content": content},
            "default": {
                "description": "An error",
                "content": {"application/json": {"schema": {"$ref": _REF.format(model="Error")}}},
            },
        },
    }
    if operation.body is not None:
        schema = {"$ref": _REF.format(model=operation.body.__name__)}
        shown: dict[str, Any] = {"schema": schema}
        if operation.example is not None:
            named = {"model": model} if "model" in operation.body.model_fields else {}
            shown["example"] = named | operation.example
        found["requestBody"] = {"required": True, "content": {"application/json": shown}}
    names = re.findall(r"\{(\w+)\}", operation.path)
    if names:
        found["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
        ]
    return found
