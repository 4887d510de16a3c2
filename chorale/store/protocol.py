"""The interface of the store, and the values that it stores.

A stored response contains its new input and its output, not its history, which is the chain of
``previous_id`` or the beginning of its conversation. Branches therefore share their past without affecting
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


RETRY_SECONDS = 5.0  # Retry-After of a store error
# Keys of a stored body that are never shown.
TOOL_STATE = "_tool_state"
RENDERING = "_rendering"  # what the events of a background response need beside the shown ones
RESPONSE_ID = re.compile(r"resp_[0-9a-f]{32}")
CONVERSATION_ID = re.compile(r"conv_[0-9a-f]{32}")
ITEM_ID = re.compile(r"[a-z]{2,4}_[0-9a-f]{32}")
RESTARTED = {
    "code": "server_error",
    "message": "the server that worked on this response ended before it was done",
}
LIVE = ("queued", "in_progress")  # every other status is final
KEPT = ("completed", "incomplete")  # only these are appended to their conversation


class StoreError(ChoraleError, status=503, type="service_unavailable", code="store_unavailable"):
    """The store failed (disk full, locked, unreachable) and may work later.

    Requests that can do without the store are still answered (see the endpoint); others get a 503.
    """

    def __init__(self, message: str, **details: Any) -> None:
        super().__init__(message, **{"retry_after": RETRY_SECONDS, **details})


class NoSpaceError(StoreError):
    """The disk is full or read-only: the server runs without storing and retries with each write."""


class PreviousResponseNotFoundError(NotFoundError, code="previous_response_not_found"): ...


class ConversationNotFoundError(NotFoundError, code="conversation_not_found"): ...


class ConversationLockedError(RequestError, code="conversation_locked"):
    """Another request works on the conversation (OpenAI's status, code and param)."""


@dataclass(frozen=True, slots=True)
class StoredItem:
    """An item in the API's form, and the harmony message that the model generated for it (or empty)."""

    item: Item
    token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """``body``: the response object, with an empty list for its ``output``."""

    id: str
    owner: bytes  # hash of the API key, or empty; other keys cannot see it
    previous_id: str | None
    created: float  # time.time()
    status: str
    body: dict[str, Any]
    input: tuple[StoredItem, ...]
    output: tuple[StoredItem, ...]
    conversation_id: str | None = None
    conversation_end: int = 0  # items of the conversation before this position were its history

    def to_object(self) -> dict[str, Any]:
        """Returns the response object as it was sent."""
        shown = {key: value for key, value in self.body.items() if key not in (TOOL_STATE, RENDERING)}
        return {**shown, "output": [stored.item for stored in self.output]}


@dataclass(frozen=True, slots=True)
class StoredCompletion:
    """``completion``: the object as it was sent, with ``metadata``; ``messages``: of the request."""

    completion: dict[str, Any]
    messages: list[dict[str, Any]]

    @property
    def id(self) -> str:
        return str(self.completion["id"])


@dataclass(frozen=True, slots=True)
class CompletionFilter:
    """``after``: the id before the page."""

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
    num_failed_puts: int  # since this process started
    num_evicted: int  # since this process started
    num_conversations: int = 0
    num_live: int = 0  # running background responses of all processes on this store


@dataclass(frozen=True, slots=True)
class EventChunk:
    """Consecutive events of a background response's turn, encoded by the API."""

    first: int  # number of its first event
    num_events: int
    data: bytes


@dataclass(frozen=True, slots=True)
class EventPage:
    """Events from a position on. A response that is not ``live`` gets no more."""

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
    """One request's right to append to a conversation. ``end``: number of items when it was taken."""

    conversation_id: str
    owner: bytes
    token: str
    end: int


@dataclass(frozen=True, slots=True)
class ItemPage:
    items: tuple[StoredItem, ...]
    has_more: bool


class ResponseStore(Protocol):
    """The store. Its coroutines never block the event loop, and raise ``StoreError`` if the disk fails."""

    @property
    def fault(self) -> str | None:
        """The error of the last write, or None if it succeeded."""
        ...

    @property
    def background(self) -> BackgroundResponses: ...

    @property
    def conversations(self) -> Conversations: ...

    @property
    def completions(self) -> Completions: ...

    async def put(self, response: StoredResponse, lease: Lease | None = None) -> None:
        """Stores a response durably. The id must be new.

        With ``lease``, input and output are appended to its conversation in the same transaction if the
        response is completed or incomplete, and the lease ends.
        """
        ...

    async def get(self, response_id: str, owner: bytes) -> StoredResponse | None: ...

    async def chain(self, response_id: str, owner: bytes) -> list[StoredItem]:
        """Returns the input and output items of the response and its predecessors, oldest first.

        Raises ``PreviousResponseNotFoundError`` if one of them is missing, ``RequestError`` if it has not
        ended, and ``ContextLengthError`` if the chain exceeds any context window.
        """
        ...

    async def items(self, item_ids: list[str], owner: bytes) -> dict[str, StoredItem]:
        """Returns the stored ones of the items, by id."""
        ...

    async def tool_state(self, item_id: str, owner: bytes) -> dict[str, Any] | None:
        """Returns the tools' final state of the response that has this item."""
        ...

    async def delete(self, response_id: str, owner: bytes) -> bool:
        """Deletes it. Returns whether it existed."""
        ...

    async def stats(self) -> StoreStats: ...

    async def close(self) -> None:
        """Finishes accepted jobs and closes. Idempotent."""
        ...


class Recover(Protocol):
    """Ends a response from its events, when its server is dead or another one cancels it."""

    def __call__(
        self, response: StoredResponse, chunks: Sequence[bytes], status: str
    ) -> tuple[StoredResponse, bytes, int]:
        """Returns the ended response, and the data and number of the events that end it."""
        ...


def without_output(
    response: StoredResponse, chunks: Sequence[bytes], status: str
) -> tuple[StoredResponse, bytes, int]:
    """A ``Recover`` that ignores the events: the response ends without output."""
    body = {**response.body, "status": status, "error": RESTARTED if status == "failed" else None}
    return replace(response, status=status, body=body), b"", 0


class BackgroundResponses(Protocol):
    """Responses that are stored before they end, each owned by one server process.

    The status moves forward: queued, in_progress, one final status. If its server dies, a response is
    ``queued`` again, without owner and events, if it may be resumed and has had fewer than ``MAX_ATTEMPTS``
    attempts; otherwise it fails. Methods that return whether they succeeded return False when this server no
    longer owns the response, because it was ended elsewhere or deleted.
    """

    async def begin(self, response: StoredResponse, server_id: str, request: bytes | None = None) -> None:
        """Stores a queued response. ``request``: returned by ``claim`` on another server, if resumable."""
        ...

    async def append(
        self, response_id: str, server_id: str, status: str, events: EventChunk, *, repeatable: bool = True
    ) -> bool:
        """Appends events. ``repeatable`` False: the response may not be resumed from now on."""
        ...

    async def settle(self, response_id: str, owner: bytes) -> None:
        """Makes the response not resumable, before a reader gets its events."""
        ...

    async def waiting(self) -> list[tuple[str, str]]:
        """Returns (id, model) of the responses that wait for a server."""
        ...

    async def claim(self, response_id: str, server_id: str) -> Claimed | None:
        """Takes a waiting response. Returns None if another server did, or if it was deleted."""
        ...

    async def unclaim(self, response_id: str, server_id: str) -> None:
        """Returns a claimed response to the queue. The attempt does not count."""
        ...

    async def put_back(self, server_id: str) -> list[str]:
        """Puts back the server's resumable responses at an orderly stop. Returns their ids."""
        ...

    async def finish(
        self, response: StoredResponse, server_id: str, events: EventChunk, lease: Lease | None = None
    ) -> bool: ...

    async def end(self, response_id: str, owner: bytes, status: str) -> StoredResponse | None:
        """Ends it from any server as ``cancelled`` or ``failed``. No effect if it has ended."""
        ...

    async def events(self, response_id: str, owner: bytes, start: int) -> EventPage | None:
        """Returns events from number ``start``, which must begin a chunk."""
        ...

    async def beat(self, server_id: str) -> set[str]:
        """Counts a heartbeat. Returns the ids of the server's live responses."""
        ...

    async def fail(self, server_id: str, response_ids: set[str]) -> None:
        """Fails responses that the server owns but does not work on."""
        ...

    async def servers(self) -> dict[str, int]:
        """Returns the number of heartbeats of every registered server."""
        ...

    async def expire(self, server_id: str, beat: int | None) -> list[str]:
        """Puts back or fails all responses of a dead server, unless its count of heartbeats is not ``beat``.

        Returns the ids of those that failed. A process that stops in order expires itself (``beat`` None).
        """
        ...


class Conversations(Protocol):
    """Raises ``ConversationNotFoundError`` for unknown ids, ``ConversationLockedError`` for leased ones."""

    async def create(
        self, owner: bytes, metadata: dict[str, str], items: Sequence[StoredItem]
    ) -> Conversation: ...

    async def get(self, conversation_id: str, owner: bytes) -> Conversation: ...

    async def update(self, conversation_id: str, owner: bytes, metadata: dict[str, str]) -> Conversation: ...

    async def delete(self, conversation_id: str, owner: bytes) -> None: ...

    async def history(self, conversation_id: str, owner: bytes) -> list[StoredItem]:
        """Returns all items, oldest first. Raises ``ContextLengthError`` beyond any context window."""
        ...

    async def page(
        self, conversation_id: str, owner: bytes, *, after: str | None, limit: int, newest_first: bool
    ) -> ItemPage: ...

    async def item(self, conversation_id: str, owner: bytes, item_id: str) -> StoredItem | None: ...

    async def append(
        self, conversation_id: str, owner: bytes, items: Sequence[StoredItem]
    ) -> list[StoredItem]:
        """Returns the items as stored; an id that is in use is replaced."""
        ...

    async def remove(self, conversation_id: str, owner: bytes, item_id: str) -> Conversation | None:
        """Returns the conversation without the item, or None if the item is not in it."""
        ...

    async def take(self, conversation_id: str, owner: bytes, server_id: str) -> Lease: ...

    async def release(self, lease: Lease, items: Sequence[StoredItem] = ()) -> None:
        """Ends the lease after appending ``items``. A deleted conversation is not an error."""
        ...


class Completions(Protocol):
    """Stored chat completions."""

    async def put(self, made: StoredCompletion, owner: bytes) -> None:
        """Stores it durably."""
        ...

    async def get(self, completion_id: str, owner: bytes) -> StoredCompletion | None: ...

    async def update(
        self, completion_id: str, owner: bytes, metadata: dict[str, str]
    ) -> StoredCompletion | None:
        """Replaces the metadata. Returns None if it does not exist."""
        ...

    async def delete(self, completion_id: str, owner: bytes) -> bool:
        """Deletes it. Returns whether it existed."""
        ...

    async def page(self, owner: bytes, wanted: CompletionFilter) -> tuple[list[dict[str, Any]], bool] | None:
        """Returns (completions, whether more follow), or None if ``wanted.after`` does not exist."""
        ...
