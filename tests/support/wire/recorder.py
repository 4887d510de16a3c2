"""Records all objects that a server sends, in order, each with the provider's type.

An ``httpx2`` response hook: the answer to every request of a scenario is recorded and classified by its path.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx2

from tests.support.sse import frames

OPENAI, ANTHROPIC, OPEN_RESPONSES = "openai", "anthropic", "open_responses"
DIALECT = "x-responses-dialect"
# (method, path, type of a JSON answer, type of a stream's events)
_TYPES: tuple[tuple[str, str, str, str], ...] = (
    ("POST", r"/v1/chat/completions", "ChatCompletion", "ChatCompletionChunk"),
    ("GET", r"/v1/chat/completions", "ChatCompletionList", ""),
    ("GET", r"/v1/chat/completions/[^/]+/messages", "ChatCompletionMessageList", ""),
    ("DELETE", r"/v1/chat/completions/[^/]+", "ChatCompletionDeleted", ""),
    ("(GET|POST)", r"/v1/chat/completions/[^/]+", "ChatCompletion", ""),
    ("POST", r"/v1/completions", "Completion", "Completion"),
    ("POST", r"/v1/messages", "Message", "RawMessageStreamEvent"),
    ("POST", r"/v1/messages/count_tokens", "MessageTokensCount", ""),
    ("POST", r"/v1/responses", "Response", "ResponseStreamEvent"),
    ("POST", r"/v1/responses/input_tokens", "InputTokenCountResponse", ""),
    ("POST", r"/v1/responses/compact", "CompactedResponse", ""),
    ("POST", r"/v1/responses/[^/]+/cancel", "Response", ""),
    ("GET", r"/v1/responses/[^/]+/input_items", "ResponseItemList", ""),
    ("GET", r"/v1/responses/[^/]+", "Response", "ResponseStreamEvent"),
    ("DELETE", r"/v1/responses/[^/]+", "ResponseDeleted", ""),
    ("DELETE", r"/v1/conversations/[^/]+", "ConversationDeletedResource", ""),
    ("(GET|POST)", r"/v1/conversations/[^/]+/items", "ConversationItemList", ""),
    ("GET", r"/v1/conversations/[^/]+/items/[^/]+", "ConversationItem", ""),
    ("(GET|POST|DELETE)", r"/v1/conversations(/[^/]+)?(/items/[^/]+)?", "Conversation", ""),
    ("GET", r"/v1/models", "ModelList", ""),
    ("GET", r"/v1/models/.+", "Model", ""),
)
_OPEN = {
    "Response": "ResponseResource",
    "ResponseStreamEvent": "StreamingEvent",
    "CompactedResponse": "CompactResource",
}


@dataclass(frozen=True, slots=True)
class Seen:
    """One object that the server sent. ``source``: the request, for messages."""

    value: Any
    provider: str
    root: str
    source: str


@dataclass(frozen=True, slots=True)
class Exchange:
    """An answer as it was sent, for clients that parse it again."""

    path: str
    dialect: str
    source: str
    content_type: str
    body: str


@dataclass
class Recorder:
    seen: list[Seen] = field(default_factory=list)
    exchanges: list[Exchange] = field(default_factory=list)
    scenario: str = ""

    async def __call__(self, response: httpx2.Response) -> None:
        await response.aread()
        self.seen += self._read(response)
        if response.status_code == 200 and response.request.method == "POST":
            dialect = response.request.headers.get(DIALECT, "openai")
            path, kind = response.request.url.path, response.headers["content-type"]
            asked = response.request.content.decode()
            self.exchanges.append(
                Exchange(path, dialect, f"{self.scenario}: {asked}", kind, response.content.decode())
            )

    def _read(self, response: httpx2.Response) -> Iterator[Seen]:
        method, path = response.request.method, response.request.url.path
        dialect = response.request.headers.get(DIALECT, "openai")
        source = f"{self.scenario}: {method} {path} ({dialect})"
        provider = ANTHROPIC if path.startswith("/v1/messages") else OPENAI
        if response.status_code >= 400:
            yield Seen(response.json(), provider, "ErrorResponse", f"{source} {response.status_code}")
            return
        body, event = type_of(method, path)
        if response.headers["content-type"].startswith("application/json"):
            values = [(response.json(), body)]
        else:
            values = [(value, event) for value in frames(response)]
        for value, root in values:
            if "error" in value and root in ("ChatCompletionChunk", "Completion"):
                root = "ErrorResponse"
            is_open = dialect == "open-responses" and root in _OPEN
            if is_open:
                yield Seen(value, OPEN_RESPONSES, _OPEN[root], source)
            if not is_open or root != "ResponseStreamEvent":  # these events also have names
                yield Seen(value, provider, root, source)


def type_of(method: str, path: str) -> tuple[str, str]:
    """Returns both types of an endpoint. Raises ``LookupError`` for an unknown endpoint."""
    for methods, pattern, body, event in _TYPES:
        if re.fullmatch(methods, method) and re.fullmatch(pattern, path):
            return body, event
    raise LookupError(f"{method} {path}")
