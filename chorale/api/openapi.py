"""/openapi.json and /docs: written by hand from the request models and the table of limits.

``operations`` is the list of what is served; a test holds it against the routes. The docs page is one
static file without scripts from anywhere; both are off with --disable-docs.
"""

from __future__ import annotations

import functools
import html
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
from chorale.api.http import json_response
from chorale.api.limits import LIMITS, SIZES
from chorale.api.messages.request import CountRequest, MessagesRequest
from chorale.api.responses.compact import CompactRequest
from chorale.api.responses.request import ResponsesRequest
from chorale.api.state import ServerState
from chorale.api.tokenize import DetokenizeRequest, TokenizeRequest
from chorale.version import __version__

_CONVERSATION = "/v1/conversations/{conversation_id}"
_REF = "#/components/schemas/{model}"
_HTML_HEADERS = {
    "content-type": "text/html; charset=utf-8",
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
}


@dataclass(frozen=True, slots=True)
class Operation:
    method: str
    path: str
    summary: str
    body: type[BaseModel] | None = None
    streams: bool = False


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
    return [Route("/openapi.json", _openapi), Route("/docs", partial(_docs, page()))]


async def _openapi(request: Request) -> Response:
    return json_response(describe())


async def _docs(text: str, request: Request) -> Response:
    return Response(text, headers=_HTML_HEADERS)


@functools.cache
def describe() -> dict[str, Any]:
    """The OpenAPI 3.1 document, made when it is first asked for (a tenth of a second). Not to be changed."""
    listed = operations()
    bodies = sorted({op.body for op in listed if op.body is not None}, key=lambda model: model.__name__)
    _, schemas = models_json_schema([(model, "validation") for model in bodies], ref_template=_REF)
    paths: dict[str, dict[str, Any]] = {}
    for operation in listed:
        paths.setdefault(operation.path, {})[operation.method.lower()] = _describe(operation)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Chorale", "version": __version__},
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


def _describe(operation: Operation) -> dict[str, Any]:
    name = "".join(part for part in operation.path.title() if part.isalnum())
    content: dict[str, Any] = {"application/json": {}}
    if operation.streams:
        content["text/event-stream"] = {}
    found: dict[str, Any] = {
        "summary": operation.summary,
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
        found["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    if "{" in operation.path:
        name = operation.path.partition("{")[2].partition("}")[0]
        found["parameters"] = [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}}]
    return found


def page() -> str:
    """One page: the operations and the limits."""
    rows = [
        f"<tr><td>{op.method}</td><td><code>{html.escape(op.path)}</code></td><td>{html.escape(op.summary)}</td></tr>"
        for op in operations()
    ]
    numbers = [
        f"<tr><td><code>{html.escape(name)}</code></td><td>{'&gt;' if limit.exclusive_min else ''}{limit.min}"
        f"</td><td>{limit.max}</td><td>{html.escape(limit.doc)}</td></tr>"
        for name, limit in LIMITS.items()
    ]
    sizes = [
        f"<tr><td>{html.escape(size.doc)}</td><td></td><td>{size.max} {size.unit}</td><td></td></tr>"
        for size in SIZES.values()
    ]
    return _PAGE.format(version=__version__, operations="\n".join(rows), numbers="\n".join(numbers + sizes))


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Chorale API</title>
<style>body{{font:16px/1.5 system-ui,sans-serif;max-width:60em;margin:2em auto;padding:0 1em}}
table{{border-collapse:collapse}}
td,th{{padding:.2em .8em;border-bottom:1px solid #ccc;text-align:left}}</style>
</head><body><h1>Chorale {version}</h1>
<p>The OpenAPI description is <a href="openapi.json">openapi.json</a>.</p>
<h2>Endpoints</h2><table>{operations}</table>
<h2>Limits</h2><table><tr><th>field</th><th>least</th><th>most</th><th>meaning</th></tr>
{numbers}</table></body></html>
"""
