"""/openapi.json, generated from the operations and their request models, and shown at /docs.

--disable-fastapi-docs turns both off.
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

from chorale.api.http.responses import json_response
from chorale.api.state import Handler, ServerState
from chorale.version import __version__

_CONVERSATION = "/v1/conversations/{conversation_id}"
_REF = "#/components/schemas/{model}"


@dataclass(frozen=True, slots=True)
class Operation:
    """A method of a path. ``body``: the model of its body; ``streams``: it may answer with events."""

    method: str
    path: str
    handler: Handler
    summary: str
    body: type[BaseModel] | None = None
    streams: bool = False
    media_type: str = "application/json"  # Content-Type of the body


_QUESTION = [{"role": "user", "content": "What is 17 + 25?"}]
_ANSWER = [200005, 17196, 200008, 4689, 200002]  # <|channel|>final<|message|>42<|return|>
# Working examples of bodies.
EXAMPLES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": _QUESTION},
    "/v1/chat/completions/render": {"messages": _QUESTION},
    "/v1/chat/completions/batch": {"messages": [_QUESTION, _QUESTION]},
    "/v1/chat/completions/derender": {
        "chat_request": {"messages": _QUESTION},
        "generate_response": {"request_id": "1", "choices": [{"index": 0, "token_ids": _ANSWER}]},
    },
    "/v1/completions/derender": {
        "generate_responses": [{"request_id": "1", "choices": [{"index": 0, "token_ids": _ANSWER}]}]
    },
    "/inference/v1/generate": {"token_ids": [5045, 11, 1920, 11], "sampling_params": {"max_tokens": 8}},
    "/inference/v1/abort_requests": {"request_ids": ["generate-tokens-1"]},
    "/v1/completions": {"prompt": "One, two,", "max_tokens": 8},
    "/v1/completions/render": {"prompt": "One, two,", "max_tokens": 8},
    "/v1/messages": {"max_tokens": 200, "messages": _QUESTION},
    "/v1/messages/count_tokens": {"messages": _QUESTION},
    "/v1/responses": {"input": "What is 17 + 25?"},
    "/v1/responses/input_tokens": {"input": "What is 17 + 25?"},
    "/v1/messages/render": {"max_tokens": 200, "messages": _QUESTION},
    "/v1/responses/render": {"input": "What is 17 + 25?"},
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
    "/v1/files": "Files",
    "/v1/batches": "Batches",
    "/v1/models": "Models",
    "/inference/v1": "Tokens",
}


def routes(state: ServerState, operations: tuple[Operation, ...]) -> list[Route]:
    if state.config.disable_docs:
        return []
    return [Route("/openapi.json", partial(_openapi, state, operations))]


async def _openapi(state: ServerState, operations: tuple[Operation, ...], request: Request) -> Response:
    config = state.config
    path = config.root_path.rstrip("/") or "/"
    refuses = config.unknown_fields == "refuse"
    return json_response(describe(operations, path, state.model_names[0], refuses=refuses))


@functools.cache
def describe(
    operations: tuple[Operation, ...],
    server: str = "/",
    model: str = "gpt-oss-20b",
    *,
    refuses: bool = False,
) -> dict[str, Any]:
    """Returns the OpenAPI 3.1 document, which is cached and must not be modified.

    ``server``: prefix of all paths. ``model``: name in examples. ``refuses``: unknown fields are errors.
    """
    bodies = sorted({op.body for op in operations if op.body is not None}, key=lambda model: model.__name__)
    _, schemas = models_json_schema([(model, "validation") for model in bodies], ref_template=_REF)
    found = schemas.get("$defs", {})
    paths: dict[str, dict[str, Any]] = {}
    for operation in operations:
        paths.setdefault(operation.path, {})[operation.method.lower()] = _describe(operation, model)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Chorale", "version": __version__},
        "servers": [{"url": server}],
        "paths": paths,
        "components": {
            "schemas": {**(found if refuses else _opened(found)), "Error": _ERROR},
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"bearer": []}],
    }


def _opened(schema: Any) -> Any:
    """Returns the schema without ``additionalProperties: false``."""
    if isinstance(schema, list):
        return [_opened(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    return {key: _opened(value) for key, value in schema.items() if (key, value) != _CLOSED}


_CLOSED = ("additionalProperties", False)
_STRING, _OPTIONAL_STRING = {"type": "string"}, {"type": ["string", "null"]}
_ERROR_FIELDS = {"message": _STRING, "type": _STRING, "param": _OPTIONAL_STRING, "code": _OPTIONAL_STRING}
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {"error": {"type": "object", "required": list(_ERROR_FIELDS), "properties": _ERROR_FIELDS}},
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
            "200": {"description": "Success", "content": content},
            "default": {
                "description": "Error",
                "content": {"application/json": {"schema": {"$ref": _REF.format(model="Error")}}},
            },
        },
    }
    if operation.body is not None:
        schema = {"$ref": _REF.format(model=operation.body.__name__)}
        shown: dict[str, Any] = {"schema": schema}
        if (example := EXAMPLES.get(operation.path)) is not None:
            named = {"model": model} if "model" in operation.body.model_fields else {}
            shown["example"] = named | example
        found["requestBody"] = {"required": True, "content": {operation.media_type: shown}}
    names = re.findall(r"\{(\w+)\}", operation.path)
    if names:
        found["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
        ]
    return found
