"""Data types and errors of the response store, and ``Recover``, a callback that the API provides.

A stored response contains its new input and its output, but not its history: this is the chain of
``previous_id`` or the beginning of its conversation. Branches therefore share their history without affecting
each other. An item may carry the harmony token ids that it was made from, for exact replay.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from chorale.errors import ChoraleError, NotFoundError, RequestError

Item = dict[str, Any]


def present(**fields: Any) -> Item:
    """Returns the fields that have a value, for objects that omit absent keys."""
    return {key: value for key, value in fields.items() if value is not None}


RETRY_SECONDS = 5.0  # Retry-After header of a store error
# Keys of a stored body that are never shown.
TOOL_STATE = "_tool_state"
RENDERING = "_rendering"  # further data for rendering the events of a background response
RESPONSE_ID = re.compile(r"resp_[0-9a-f]{32}")
CONVERSATION_ID = re.compile(r"conv_[0-9a-f]{32}")
ITEM_ID = re.compile(r"[a-z]{2,4}_[0-9a-f]{32}")
RESTARTED = {
    "code": "server_error",
    "message": "the server that ran this response stopped before the response was complete",
}
LIVE = ("queued", "in_progress")  # every other status is final
KEPT = ("completed", "incomplete")  # only responses with these statuses are appended to a conversation


class StoreError(ChoraleError, status=503, type="service_unavailable", code="store_unavailable"):
    """The store failed (disk full, locked, unreachable) and may work later.

    Requests that do not need the store are still answered; others get a 503.
    """

    def __init__(self, message: str, **details: Any) -> None:
        super().__init__(message, **{"retry_after": RETRY_SECONDS, **details})


class NoSpaceError(StoreError):
    """The disk is full or read-only: the server runs without storing and retries with each write."""


class PreviousResponseNotFoundError(NotFoundError, code="previous_response_not_found"): ...


class ConversationNotFoundError(NotFoundError, code="conversation_not_found"): ...


class ConversationLockedError(RequestError, code="conversation_locked"):
    """Another request is using the conversation. Status, code and param are OpenAI's."""


@dataclass(frozen=True, slots=True)
class StoredItem:
    """An item in the API's form. ``token_ids``: the harmony message that the model generated, or empty."""

    item: Item
    token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response and its items. ``body``: the response object, with an empty ``output``."""

    id: str
    owner: bytes  # hash of the API key, or empty; other keys cannot see it
    previous_id: str | None
    created: float  # time.time()
    status: str
    body: dict[str, Any]
    input: tuple[StoredItem, ...]
    output: tuple[StoredItem, ...]
    conversation_id: str | None = None
    conversation_end: int = 0  # its history: the items of the conversation before this position

    def to_object(self) -> dict[str, Any]:
        """Returns the response object that clients get."""
        shown = {key: value for key, value in self.body.items() if key not in (TOOL_STATE, RENDERING)}
        return {**shown, "output": [stored.item for stored in self.output]}


@dataclass(frozen=True, slots=True)
class StoredCompletion:
    """``completion``: the object that clients get, with ``metadata``. ``messages``: those of the request."""

    completion: dict[str, Any]
    messages: list[dict[str, Any]]

    @property
    def id(self) -> str:
        return str(self.completion["id"])


@dataclass(frozen=True, slots=True)
class CompletionFilter:
    """``after``: the id of the last completion of the previous page."""

    after: str | None = None
    limit: int = 20
    newest_first: bool = False
    model: str | None = None
    metadata: Mapping[str, str] | None = None

    def takes(self, completion: Mapping[str, Any]) -> bool:
        if self.model is not None and completion["model"] != self.model:
            return False
        has = completion.get("metadata") or {}
        return all(has.get(key) == value for key, value in (self.metadata or {}).items())


@dataclass(frozen=True, slots=True)
class StoreStats:
    num_responses: int
    num_bytes: int
    num_conversations: int = 0
    num_live: int = 0  # running background responses of all processes on this store


@dataclass(frozen=True, slots=True)
class EventChunk:
    """Consecutive events of a background response's turn, encoded by the API."""

    first: int  # number of the first event
    num_events: int
    data: bytes


@dataclass(frozen=True, slots=True)
class EventPage:
    """Events from a given number on. A response that is not ``live`` gets no further events."""

    live: bool
    repeatable: bool  # the response may be resumed after a crash, with other events
    chunks: tuple[EventChunk, ...]


@dataclass(frozen=True, slots=True)
class Claimed:
    """A background response begun by another server and now claimed by this one."""

    response: StoredResponse
    request: bytes  # as passed to ``BackgroundResponses.begin``
    lease: Lease | None


@dataclass(frozen=True, slots=True)
class Conversation:
    id: str
    owner: bytes
    created: float
    metadata: dict[str, str]

    def to_object(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "conversation",
            "created_at": int(self.created),
            "metadata": self.metadata,
        }


@dataclass(frozen=True, slots=True)
class Lease:
    """One request's right to append to a conversation. ``end``: next free position when it was taken."""

    conversation_id: str
    owner: bytes
    token: str
    end: int


@dataclass(frozen=True, slots=True)
class ItemPage:
    items: tuple[StoredItem, ...]
    has_more: bool


class Recover(Protocol):
    """Ends a response whose server died or that another server cancels, with the output in its events."""

    def __call__(
        self, response: StoredResponse, chunks: Sequence[bytes], status: str
    ) -> tuple[StoredResponse, bytes, int]:
        """Returns (ended response, encoded events to append, number of these events)."""
        ...


def without_output(
    response: StoredResponse, chunks: Sequence[bytes], status: str
) -> tuple[StoredResponse, bytes, int]:
    """A ``Recover`` that ignores the events: the response ends without output."""
    body = {**response.body, "status": status, "error": RESTARTED if status == "failed" else None}
    return replace(response, status=status, body=body), b"", 0
