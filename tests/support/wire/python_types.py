"""The same objects through the types of the Python SDKs, strictly: what is not Optional is never null."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import anthropic.types as anthropic
import openai.types as openai
import openai.types.chat as chat
import openai.types.conversations as conversations
import openai.types.responses as responses
from openai.types.shared import ErrorObject
from pydantic import BaseModel, TypeAdapter, ValidationError

_TYPES: dict[str, Any] = {
    "ChatCompletion": chat.ChatCompletion,
    "ChatCompletionChunk": chat.ChatCompletionChunk,
    "ChatCompletionDeleted": chat.ChatCompletionDeleted,
    "CompactedResponse": responses.CompactedResponse,
    "Conversation": conversations.Conversation,
    "ConversationDeletedResource": conversations.ConversationDeletedResource,
    "ConversationItem": conversations.ConversationItem,
    "ConversationItemList": conversations.ConversationItemList,
    "InputTokenCountResponse": responses.InputTokenCountResponse,
    "Message": anthropic.Message,
    "MessageTokensCount": anthropic.MessageTokensCount,
    "Model": openai.Model,
    "Response": responses.Response,
    "ResponseItemList": responses.ResponseItemList,
    "ResponseStreamEvent": responses.ResponseStreamEvent,
}
# (root, end of the place): why the SDK's type is not followed. See the same places in ``table``.
EXCEPTIONS = {
    ("ChatCompletionChunk", "delta.tool_calls.0.type"): "a custom call; this type knows functions only",
    ("CompactedResponse", "output.0"): "the user's messages, as in OpenAI's example",
    ("ConversationItemList", "first_id"): "an empty list has no first item",
    ("ConversationItemList", "last_id"): "an empty list has no last item",
}
_LISTS = {"ChatCompletionList": "ChatCompletion", "ModelList": "Model"}


def violations(value: Any, provider: str, root: str) -> Iterator[str]:
    """What the SDK's types say against an object; nothing for the roots that have none."""
    if root in _LISTS:
        for entry in value["data"]:
            yield from violations(entry, provider, _LISTS[root])
        return
    if root == "ErrorResponse" and provider == "openai":
        yield from _invalid(value["error"], ErrorObject)
    elif root == "RawMessageStreamEvent" and value["type"] not in ("ping", "error"):
        yield from _invalid(value, anthropic.RawMessageStreamEvent)
    elif root in _TYPES and provider != "open_responses":
        yield from (fault for fault in _invalid(value, _TYPES[root]) if not _is_exception(root, fault))


def _is_exception(root: str, fault: str) -> bool:
    place = fault.partition(":")[0]
    return any(root == of and f".{place}.".find(f".{end}.") >= 0 for of, end in EXCEPTIONS)


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def _invalid(value: Any, kind: Any) -> Iterator[str]:
    try:
        read = _adapter(kind).validate_python(value, strict=True)
    except ValidationError as error:
        yield from (f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors()[:3])
    else:
        assert isinstance(read, BaseModel)
