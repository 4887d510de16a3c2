"""OPERATIONS: all operations of the API, which the server routes and /openapi.json describes."""

from __future__ import annotations

from functools import partial

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from chorale.api.batches import endpoint as batches
from chorale.api.batches.endpoint import CreateBatch
from chorale.api.chat import endpoint as chat
from chorale.api.chat import stored
from chorale.api.chat.batch import BatchChatRequest, create_batch
from chorale.api.chat.request import ChatRequest
from chorale.api.chat.stored import MetadataUpdate
from chorale.api.completions import endpoint as completions
from chorale.api.completions.request import CompletionRequest
from chorale.api.conversations import endpoint as conversations
from chorale.api.conversations.endpoint import CreateConversation, CreateItems, UpdateConversation
from chorale.api.files import endpoint as files
from chorale.api.files.request import UploadForm
from chorale.api.http.responses import read_json
from chorale.api.messages import endpoint as messages
from chorale.api.messages.request import CountRequest, MessagesRequest
from chorale.api.openapi import Operation
from chorale.api.operator import adapters, admin, health, models, render, weights
from chorale.api.operator.adapters import LoadRequest, UnloadRequest
from chorale.api.operator.admin import guarded
from chorale.api.operator.tokenize import DetokenizeRequest, TokenizeRequest, detokenize, tokenize
from chorale.api.responses import endpoint as responses
from chorale.api.responses.compact import CompactRequest, compact
from chorale.api.responses.request import ResponsesRequest
from chorale.api.state import ServerState
from chorale.api.tokens import endpoint as tokens
from chorale.api.tokens.derender import derender_chat, derender_completion
from chorale.api.tokens.generated import DerenderChatRequest, DerenderCompletionRequest
from chorale.api.tokens.request import AbortRequest, GenerateRequest
from chorale.errors import RequestError

_CHAT = "/v1/chat/completions"
_STORED_CHAT = f"{_CHAT}/{{completion_id}}"
_RESPONSE = "/v1/responses/{response_id}"
_CONVERSATION = "/v1/conversations/{conversation_id}"


async def invoke(state: ServerState, request: Request) -> Response:
    """Serves a chat for ``messages``, a completion for ``prompt``, a response for ``input``.

    The only path that SageMaker calls.
    """
    body = await read_json(request, state.config)
    endpoints = {"messages": chat.create, "prompt": completions.create, "input": responses.create}
    named = [key for key in endpoints if key in body]
    if len(named) != 1:
        raise RequestError("the body must have messages (chat), prompt (completions) or input (responses)")
    return await endpoints[named[0]](state, request)  # the request caches its body


get, post, delete = (partial(Operation, method) for method in ("GET", "POST", "DELETE"))
# For administrators. The paths are the names of the functions.
_ADMIN = (
    ("POST", admin.pause, "Stop generating (mode: abort, wait or keep; clear_cache)"),
    ("POST", admin.resume, "Continue generating"),
    ("GET", admin.is_paused, "Check whether every engine is paused"),
    ("POST", admin.sleep, "Release the device's memory (level: 0, 1 or 2; mode as for /pause)"),
    ("POST", admin.wake_up, "Restore memory (tags: weights, kv_cache) and continue"),
    ("GET", admin.is_sleeping, "Check whether every engine sleeps"),
    ("POST", admin.reset_prefix_cache, "Empty the prefix cache (reset_running_requests)"),
    ("GET", admin.server_info, "Get the configuration (config_format: text or json)"),
    ("GET", admin.get_world_size, "Get the number of ranks (include_dp)"),
    ("POST", weights.init_weight_transfer_engine, "Connect the engines with a sender of weights"),
    ("POST", weights.shutdown_weight_transfer_engine, "Close the connection to the sender"),
    ("POST", weights.start_weight_update, "Begin an update of the weights, while paused"),
    ("POST", weights.update_weights, "Receive tensors (update_info)"),
    ("POST", weights.finish_weight_update, "Use the new weights (weight_version)"),
    ("POST", weights.update_weight_version, "Label the weights (new_version)"),
    ("GET", weights.weight_info, "Get the label of the weights"),
    ("POST", admin.start_profile, "Start a trace of each rank"),
    ("POST", admin.stop_profile, "End the traces and write them"),
)
# In the order in which paths are matched: "render" is not the id of a completion.
OPERATIONS = (
    # generating, and what they store
    post(_CHAT, chat.create, "Create a chat completion", ChatRequest, streams=True),
    post(f"{_CHAT}/render", render.render_chat, "Get the token ids of a chat completion", ChatRequest),
    post(
        f"{_CHAT}/derender",
        derender_chat,
        "Convert generated tokens to a chat completion",
        DerenderChatRequest,
    ),
    post(
        f"{_CHAT}/batch", create_batch, "Create chat completions of several conversations", BatchChatRequest
    ),
    get(_CHAT, stored.list_completions, "List stored chat completions"),
    get(_STORED_CHAT, stored.retrieve, "Get a stored chat completion"),
    post(_STORED_CHAT, stored.update, "Replace the metadata of a stored chat completion", MetadataUpdate),
    delete(_STORED_CHAT, stored.delete, "Delete a stored chat completion"),
    get(f"{_STORED_CHAT}/messages", stored.list_messages, "List the messages of a stored chat completion"),
    post("/v1/completions", completions.create, "Continue a raw prompt", CompletionRequest, streams=True),
    post(
        "/v1/completions/render",
        render.render_completion,
        "Get the token ids of a raw prompt",
        CompletionRequest,
    ),
    post(
        "/v1/completions/derender",
        derender_completion,
        "Convert generated tokens to a completion",
        DerenderCompletionRequest,
    ),
    post(
        "/v1/messages", messages.create, "Create a message (Anthropic's API)", MessagesRequest, streams=True
    ),
    post(
        "/v1/messages/count_tokens",
        messages.count_tokens,
        "Count the prompt tokens of a message",
        CountRequest,
    ),
    post("/v1/messages/render", render.render_message, "Get the token ids of a message", MessagesRequest),
    post(
        "/v1/responses",
        responses.create,
        "Create a response (GET with a WebSocket upgrade: many on one connection)",
        ResponsesRequest,
        streams=True,
    ),
    post(
        "/v1/responses/input_tokens",
        responses.count_tokens,
        "Count the prompt tokens of a response",
        ResponsesRequest,
    ),
    post("/v1/responses/render", render.render_response, "Get the token ids of a response", ResponsesRequest),
    post("/v1/responses/compact", compact, "Summarize a conversation", CompactRequest),
    get(
        _RESPONSE,
        responses.retrieve,
        "Get a stored response, or stream its events from any position (background responses only)",
    ),
    delete(_RESPONSE, responses.delete, "Delete a stored response"),
    post(f"{_RESPONSE}/cancel", responses.cancel, "Cancel a background response"),
    get(f"{_RESPONSE}/input_items", responses.input_items, "List the input items of a response"),
    # conversations, files and batches
    post("/v1/conversations", conversations.create, "Create a conversation", CreateConversation),
    get(_CONVERSATION, conversations.retrieve, "Get a conversation"),
    post(_CONVERSATION, conversations.update, "Replace the metadata of a conversation", UpdateConversation),
    delete(_CONVERSATION, conversations.delete, "Delete a conversation and its items"),
    get(f"{_CONVERSATION}/items", conversations.list_items, "List the items of a conversation"),
    post(f"{_CONVERSATION}/items", conversations.add_items, "Add items to a conversation", CreateItems),
    get(f"{_CONVERSATION}/items/{{item_id}}", conversations.retrieve_item, "Get an item of a conversation"),
    delete(
        f"{_CONVERSATION}/items/{{item_id}}", conversations.delete_item, "Delete an item from a conversation"
    ),
    post("/v1/files", files.create, "Upload a file", UploadForm, media_type="multipart/form-data"),
    get("/v1/files", files.list_files, "List files"),
    get("/v1/files/{file_id}", files.retrieve, "Get a file's description"),
    delete("/v1/files/{file_id}", files.delete, "Delete a file"),
    get("/v1/files/{file_id}/content", files.content, "Get a file's content"),
    post("/v1/batches", batches.create, "Create a batch", CreateBatch),
    get("/v1/batches", batches.list_batches, "List batches"),
    get("/v1/batches/{batch_id}", batches.retrieve, "Get a batch"),
    post("/v1/batches/{batch_id}/cancel", batches.cancel, "Cancel a batch"),
    # tokens, models and the server
    post(
        "/inference/v1/generate",
        tokens.generate,
        "Continue token ids with tokens",
        GenerateRequest,
        streams=True,
    ),
    post(
        "/inference/v1/abort_requests",
        tokens.abort,
        "Abort requests of the same key by their ids",
        AbortRequest,
    ),
    post(
        "/invocations",
        invoke,
        "Create a chat completion, completion or response, depending on the body (SageMaker)",
    ),
    get("/v1/models", models.list_models, "List the models"),
    get("/v1/models/{model}", models.retrieve_model, "Get a model"),
    post("/v1/load_lora_adapter", adapters.load, "Load a LoRA adapter", LoadRequest),
    post("/v1/unload_lora_adapter", adapters.unload, "Stop serving a LoRA adapter", UnloadRequest),
    post("/tokenize", tokenize, "Convert a prompt or a chat to tokens", TokenizeRequest),
    post("/detokenize", detokenize, "Convert tokens to text", DetokenizeRequest),
    get("/health", health.health, "Check the engine: 200, or 503 with the reason"),
    get("/ready", health.ready, "Check readiness: like /health, but 503 while the server drains"),
    get("/ping", health.health, "Same as /health"),
    post("/ping", health.health, "Same as /health"),
    get("/version", health.version, "Get the server's version"),
    get("/load", health.load, "Get the number of requests in progress"),
    get("/metrics", health.metrics, "Get Prometheus metrics"),
    *(Operation(method, f"/{each.__name__}", guarded(each), summary) for method, each, summary in _ADMIN),
)


def operation_routes(state: ServerState) -> list[Route]:
    """Returns the routes of all operations. Only names of models contain slashes."""
    return [
        Route(
            each.path.replace("{model}", "{model:path}"), partial(each.handler, state), methods=[each.method]
        )
        for each in OPERATIONS
    ]
