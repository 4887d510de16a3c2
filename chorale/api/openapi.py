"""/openapi.json, generated from the request models and shown at /docs.

``OPERATIONS`` lists the served operations; a test compares it with the routes. --disable-fastapi-docs turns
both off.
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

from chorale.api.batches.request import CreateBatch
from chorale.api.chat.batch import BatchChatRequest
from chorale.api.chat.request import ChatRequest
from chorale.api.chat.stored import MetadataUpdate
from chorale.api.completions.request import CompletionRequest
from chorale.api.conversations.request import CreateConversation, CreateItems, UpdateConversation
from chorale.api.files.request import UploadForm
from chorale.api.http.responses import json_response
from chorale.api.messages.request import CountRequest, MessagesRequest
from chorale.api.operator.adapters import LoadRequest, UnloadRequest
from chorale.api.operator.tokenize import DetokenizeRequest, TokenizeRequest
from chorale.api.responses.compact import CompactRequest
from chorale.api.responses.request import ResponsesRequest
from chorale.api.state import ServerState
from chorale.api.tokens.generated import DerenderChatRequest, DerenderCompletionRequest
from chorale.api.tokens.request import AbortRequest, GenerateRequest
from chorale.version import __version__

_CHAT = "/v1/chat/completions"
_STORED_CHAT = f"{_CHAT}/{{completion_id}}"
_RESPONSE = "/v1/responses/{response_id}"
_CONVERSATION = "/v1/conversations/{conversation_id}"
_REF = "#/components/schemas/{model}"


@dataclass(frozen=True, slots=True)
class Operation:
    method: str
    path: str
    summary: str
    body: type[BaseModel] | None = None
    streams: bool = False
    media_type: str = "application/json"  # Content-Type of the body

    @property
    def example(self) -> dict[str, Any] | None:
        """Returns a working example of the body, if there is one."""
        return _EXAMPLES.get(self.path)


_QUESTION = [{"role": "user", "content": "What is 17 + 25?"}]
_ANSWER = [200005, 17196, 200008, 4689, 200002]  # <|channel|>final<|message|>42<|return|>
_EXAMPLES: dict[str, dict[str, Any]] = {
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


OPERATIONS = (
    # generating, and what they store
    Operation("POST", _CHAT, "Create a chat completion", ChatRequest, streams=True),
    Operation("POST", f"{_CHAT}/render", "Get the token ids of a chat completion", ChatRequest),
    Operation(
        "POST", f"{_CHAT}/derender", "Convert generated tokens to a chat completion", DerenderChatRequest
    ),
    Operation("POST", f"{_CHAT}/batch", "Create chat completions of several conversations", BatchChatRequest),
    Operation("GET", _CHAT, "List stored chat completions"),
    Operation("GET", _STORED_CHAT, "Get a stored chat completion"),
    Operation("POST", _STORED_CHAT, "Replace the metadata of a stored chat completion", MetadataUpdate),
    Operation("DELETE", _STORED_CHAT, "Delete a stored chat completion"),
    Operation("GET", f"{_STORED_CHAT}/messages", "List the messages of a stored chat completion"),
    Operation("POST", "/v1/completions", "Continue a raw prompt", CompletionRequest, streams=True),
    Operation("POST", "/v1/completions/render", "Get the token ids of a raw prompt", CompletionRequest),
    Operation(
        "POST",
        "/v1/completions/derender",
        "Convert generated tokens to a completion",
        DerenderCompletionRequest,
    ),
    Operation("POST", "/v1/messages", "Create a message (Anthropic's API)", MessagesRequest, streams=True),
    Operation("POST", "/v1/messages/count_tokens", "Count the prompt tokens of a message", CountRequest),
    Operation("POST", "/v1/messages/render", "Get the token ids of a message", MessagesRequest),
    Operation(
        "POST",
        "/v1/responses",
        "Create a response (GET with a WebSocket upgrade: many on one connection)",
        ResponsesRequest,
        streams=True,
    ),
    Operation(
        "POST", "/v1/responses/input_tokens", "Count the prompt tokens of a response", ResponsesRequest
    ),
    Operation("POST", "/v1/responses/render", "Get the token ids of a response", ResponsesRequest),
    Operation("POST", "/v1/responses/compact", "Summarize a conversation", CompactRequest),
    Operation(
        "GET",
        _RESPONSE,
        "Get a stored response, or stream its events from any position (background responses only)",
    ),
    Operation("DELETE", _RESPONSE, "Delete a stored response"),
    Operation("POST", f"{_RESPONSE}/cancel", "Cancel a background response"),
    Operation("GET", f"{_RESPONSE}/input_items", "List the input items of a response"),
    # conversations, files and batches
    Operation("POST", "/v1/conversations", "Create a conversation", CreateConversation),
    Operation("GET", _CONVERSATION, "Get a conversation"),
    Operation("POST", _CONVERSATION, "Replace the metadata of a conversation", UpdateConversation),
    Operation("DELETE", _CONVERSATION, "Delete a conversation and its items"),
    Operation("GET", f"{_CONVERSATION}/items", "List the items of a conversation"),
    Operation("POST", f"{_CONVERSATION}/items", "Add items to a conversation", CreateItems),
    Operation("GET", f"{_CONVERSATION}/items/{{item_id}}", "Get an item of a conversation"),
    Operation("DELETE", f"{_CONVERSATION}/items/{{item_id}}", "Delete an item from a conversation"),
    Operation("POST", "/v1/files", "Upload a file", UploadForm, media_type="multipart/form-data"),
    Operation("GET", "/v1/files", "List files"),
    Operation("GET", "/v1/files/{file_id}", "Get a file's description"),
    Operation("DELETE", "/v1/files/{file_id}", "Delete a file"),
    Operation("GET", "/v1/files/{file_id}/content", "Get a file's content"),
    Operation("POST", "/v1/batches", "Create a batch", CreateBatch),
    Operation("GET", "/v1/batches", "List batches"),
    Operation("GET", "/v1/batches/{batch_id}", "Get a batch"),
    Operation("POST", "/v1/batches/{batch_id}/cancel", "Cancel a batch"),
    # tokens, models and the server
    Operation(
        "POST", "/inference/v1/generate", "Continue token ids with tokens", GenerateRequest, streams=True
    ),
    Operation(
        "POST", "/inference/v1/abort_requests", "Abort requests of the same key by their ids", AbortRequest
    ),
    Operation(
        "POST",
        "/invocations",
        "Create a chat completion, completion or response, depending on the body (SageMaker)",
    ),
    Operation("GET", "/v1/models", "List the models"),
    Operation("GET", "/v1/models/{model}", "Get a model"),
    Operation("POST", "/v1/load_lora_adapter", "Load a LoRA adapter", LoadRequest),
    Operation("POST", "/v1/unload_lora_adapter", "Stop serving a LoRA adapter", UnloadRequest),
    Operation("POST", "/tokenize", "Convert a prompt or a chat to tokens", TokenizeRequest),
    Operation("POST", "/detokenize", "Convert tokens to text", DetokenizeRequest),
    Operation("GET", "/health", "Check the engine: 200, or 503 with the reason"),
    Operation("GET", "/ready", "Check readiness: like /health, but 503 while the server drains"),
    Operation("GET", "/ping", "Same as /health"),
    Operation("POST", "/ping", "Same as /health"),
    Operation("GET", "/version", "Get the server's version"),
    Operation("GET", "/load", "Get the number of requests in progress"),
    Operation("GET", "/metrics", "Get Prometheus metrics"),
    Operation("POST", "/pause", "Stop generating (mode: abort, wait or keep; clear_cache)"),
    Operation("POST", "/resume", "Continue generating"),
    Operation("GET", "/is_paused", "Check whether every engine is paused"),
    Operation("POST", "/sleep", "Release the device's memory (level: 0, 1 or 2; mode as for /pause)"),
    Operation("POST", "/wake_up", "Restore memory (tags: weights, kv_cache) and continue"),
    Operation("GET", "/is_sleeping", "Check whether every engine sleeps"),
    Operation("POST", "/reset_prefix_cache", "Empty the prefix cache (reset_running_requests)"),
    Operation("GET", "/server_info", "Get the configuration (config_format: text or json)"),
    Operation("GET", "/get_world_size", "Get the number of ranks (include_dp)"),
    Operation("POST", "/init_weight_transfer_engine", "Connect the engines with a sender of weights"),
    Operation("POST", "/shutdown_weight_transfer_engine", "Close the connection to the sender"),
    Operation("POST", "/start_weight_update", "Begin an update of the weights, while paused"),
    Operation("POST", "/update_weights", "Receive tensors (update_info)"),
    Operation("POST", "/finish_weight_update", "Use the new weights (weight_version)"),
    Operation("POST", "/update_weight_version", "Label the weights (new_version)"),
    Operation("GET", "/weight_info", "Get the label of the weights"),
    Operation("POST", "/start_profile", "Start a trace of each rank"),
    Operation("POST", "/stop_profile", "End the traces and write them"),
)


def routes(state: ServerState) -> list[Route]:
    if state.config.disable_docs:
        return []
    return [Route("/openapi.json", partial(_openapi, state))]


async def _openapi(state: ServerState, request: Request) -> Response:
    config = state.config
    path = config.root_path.rstrip("/") or "/"
    return json_response(describe(path, state.model_names[0], refuses=config.unknown_fields == "refuse"))


@functools.cache
def describe(server: str = "/", model: str = "gpt-oss-20b", *, refuses: bool = False) -> dict[str, Any]:
    """Returns the OpenAPI 3.1 document, which is cached and must not be modified.

    ``server``: prefix of all paths. ``model``: name in examples. ``refuses``: unknown fields are errors.
    """
    bodies = sorted({op.body for op in OPERATIONS if op.body is not None}, key=lambda model: model.__name__)
    _, schemas = models_json_schema([(model, "validation") for model in bodies], ref_template=_REF)
    found = schemas.get("$defs", {})
    paths: dict[str, dict[str, Any]] = {}
    for operation in OPERATIONS:
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
        if operation.example is not None:
            named = {"model": model} if "model" in operation.body.model_fields else {}
            shown["example"] = named | operation.example
        found["requestBody"] = {"required": True, "content": {operation.media_type: shown}}
    names = re.findall(r"\{(\w+)\}", operation.path)
    if names:
        found["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
        ]
    return found
