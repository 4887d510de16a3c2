"""What is stored of responses and conversations, and the interface of the store.

A stored response holds its own new input and its output, never its history: that is the chain of
``previous_id``, or the beginning of its conversation. Branches therefore share their past and cannot
disturb each other. Every item may carry the harmony token ids behind it, for exact replay.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from chorale.errors import ChoraleError, NotFoundError, RequestError

Item = dict[str, Any]


def present(**fields: Any) -> Item:
    """The fields that have a value, for objects that leave a key out where it has none."""
    return {key: value for key, value in fields.items() if value is not None}


RETRY_SECONDS = 5.0  # after which a client may ask again for what the store could not do
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
    """The store failed now (disk full, locked, unreachable), and may work later.

    A request that can do without the store is still answered; see the endpoint. Others get a 503.
    """

    def __init__(self, message: str, **details: Any) -> None:
        super().__init__(message, **{"retry_after": RETRY_SECONDS, **details})


class NoSpaceError(StoreError):
    """The disk is full or read-only: the server runs without storing, and retries with each write."""


class PreviousResponseNotFoundError(NotFoundError, code="previous_response_not_found"): ...


class ConversationNotFoundError(NotFoundError, code="conversation_not_found"): ...


class ConversationLockedError(RequestError, code="conversation_locked"):
    """Another request works on the conversation (with OpenAI's status, code and param)."""


@dataclass(frozen=True, slots=True)
class StoredItem:
    """An item as the API shows it, and the harmony message that the model produced for it (or nothing)."""

    item: Item
    token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """``body`` is the response object without its ``output`` (an empty list stands there)."""

    id: str
    owner: bytes  # hash of the API key, or empty; only its own requests see it
    previous_id: str | None
    created: float  # time.time()
    status: str
    body: dict[str, Any]
    input: tuple[StoredItem, ...]
    output: tuple[StoredItem, ...]
    conversation_id: str | None = None
    conversation_end: int = 0  # items of the conversation before this position were its history

    def to_object(self) -> dict[str, Any]:
        """The response object as it was sent."""
        shown = {key: value for key, value in self.body.items() if key not in (TOOL_STATE, RENDERING)}
        return {**shown, "output": [stored.item for stored in self.output]}


@dataclass(frozen=True, slots=True)
class StoredCompletion:
    """``completion``: the object as it was sent, with ``metadata``; ``messages``: the request's own."""

    completion: dict[str, Any]
    messages: list[dict[str, Any]]

    @property
    def id(self) -> str:
        return str(self.completion["id"])


@dataclass(frozen=True, slots=True)
class CompletionFilter:
    """``after``: the id that a page follows."""

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
    num_evicted: int  # the same
    num_conversations: int = 0
    num_live: int = 0  # background responses that have not ended, of every process on this store


@dataclass(frozen=True, slots=True)
class EventChunk:
    """Consecutive events of a background response's turn, in the API's form of them."""

    first: int  # how many events are before it
    num_events: int
    data: bytes


@dataclass(frozen=True, slots=True)
class EventPage:
    """What follows a place in the events. A response that is not ``live`` gets no more of them."""

    live: bool
    repeatable: bool  # the response may be resumed after a crash, with other events
    chunks: tuple[EventChunk, ...]


@dataclass(frozen=True, slots=True)
class Claimed:
    """A background response that another server began, and that this one now works on."""

    response: StoredResponse
    request: bytes  # as ``BackgroundResponses.begin`` got it
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
    """One request's right to append to a conversation. ``end``: where its items ended when it was taken."""

    conversation_id: str
    owner: bytes
    token: str
    end: int


@dataclass(frozen=True, slots=True)
class ItemPage:
    items: tuple[StoredItem, ...]
    has_more: bool


class ResponseStore(Protocol):
    """Coroutines that never block the event loop. ``StoreError`` where the disk fails."""

    @property
    def fault(self) -> str | None:
        """Why the last write failed; None while the store works."""
        ...

    @property
    def background(self) -> BackgroundResponses: ...

    @property
    def conversations(self) -> Conversations: ...

    @property
    def completions(self) -> Completions: ...

    async def put(self, response: StoredResponse, lease: Lease | None = None) -> None:
        """Durable when it returns. The id must be new.

        With ``lease``, input and output go to the end of its conversation in the same moment, if the
        response completed or is incomplete, and the lease is over.
        """
        ...

    async def get(self, response_id: str, owner: bytes) -> StoredResponse | None: ...

    async def chain(self, response_id: str, owner: bytes) -> list[StoredItem]:
        """Returns the input and output items of the response and of all before it, oldest first.

        Raises ``PreviousResponseNotFoundError`` when it, or one before it, is not there any more,
        ``RequestError`` when it has not ended, and ``ContextLengthError`` when the chain is beyond any
        window.
        """
        ...

    async def items(self, item_ids: list[str], owner: bytes) -> dict[str, StoredItem]:
        """Returns those of the items that are stored, by id."""
        ...

    async def tool_state(self, item_id: str, owner: bytes) -> dict[str, Any] | None:
        """Returns the state that the tools of the response with this item left to the next response."""
        ...

    async def delete(self, response_id: str, owner: bytes) -> bool:
        """Returns whether it was there."""
        ...

    async def stats(self) -> StoreStats: ...

    async def close(self) -> None:
        """Finish what was accepted. Idempotent."""
        ...


class Recover(Protocol):
    """Ends a response whose server is gone, or that is cancelled from elsewhere, by its events so far."""

    def __call__(
        self, response: StoredResponse, chunks: Sequence[bytes], status: str
    ) -> tuple[StoredResponse, bytes, int]:
        """Returns the ended response, and the data and number of the events that end it."""
        ...


def without_output(
    response: StoredResponse, chunks: Sequence[bytes], status: str
) -> tuple[StoredResponse, bytes, int]:
    """A ``Recover`` that reads no events: the response ends with no output."""
    body = {**response.body, "status": status, "error": RESTARTED if status == "failed" else None}
    return replace(response, status=status, body=body), b"", 0


class BackgroundResponses(Protocol):
    """Responses that are stored before they have ended, each owned by one server process.

    A status moves forward: queued, in_progress, and one final status. A response whose server dies is
    ``queued`` again, without an owner and without events, if it may be resumed and has been begun less than
    ``MAX_ATTEMPTS`` times; else it has failed. A method that returns whether it did it returns False when
    the response is not this server's any more: ended from elsewhere, or deleted.
    """

    async def begin(self, response: StoredResponse, server_id: str, request: bytes | None = None) -> None:
        """``request``: what ``claim`` gives to another server, if the response may be resumed."""
        ...

    async def append(
        self, response_id: str, server_id: str, status: str, events: EventChunk, *, repeatable: bool = True
    ) -> bool:
        """``repeatable`` False: from here on the response may not be resumed."""
        ...

    async def settle(self, response_id: str, owner: bytes) -> None:
        """A reader is about to get events: the response may not be resumed."""
        ...

    async def waiting(self) -> list[tuple[str, str]]:
        """Responses that wait for a server to resume them: (id, model)."""
        ...

    async def claim(self, response_id: str, server_id: str) -> Claimed | None:
        """Take a waiting response. Returns None if another server was faster, or it is gone."""
        ...

    async def unclaim(self, response_id: str, server_id: str) -> None:
        """Give back a claimed response that could not be begun. The attempt does not count."""
        ...

    async def put_back(self, server_id: str) -> list[str]:
        """At an orderly end, leave the server's resumable responses to others. Returns their ids."""
        ...

    async def finish(
        self, response: StoredResponse, server_id: str, events: EventChunk, lease: Lease | None = None
    ) -> bool: ...

    async def end(self, response_id: str, owner: bytes, status: str) -> StoredResponse | None:
        """End it from anywhere as ``cancelled`` or ``failed``; one that has ended stays as it is."""
        ...

    async def events(self, response_id: str, owner: bytes, start: int) -> EventPage | None:
        """Some of the events from number ``start`` on, which begins a chunk."""
        ...

    async def beat(self, server_id: str) -> set[str]:
        """Show that the server lives. Returns the ids of its live responses."""
        ...

    async def fail(self, server_id: str, response_ids: set[str]) -> None:
        """Fail live responses of a server that it does not work on."""
        ...

    async def servers(self) -> dict[str, int]:
        """Every server that may own something, and its count of beats."""
        ...

    async def expire(self, server_id: str, beat: int | None) -> list[str]:
        """Put back or fail what a dead server owns, unless it has shown life since beat ``beat``.

        Returns the ids of those that failed. A process that ends in order expires itself (None).
        """
        ...


class Conversations(Protocol):
    """Raises ``ConversationNotFoundError`` for an unknown id, ``ConversationLockedError`` during a lease."""

    async def create(
        self, owner: bytes, metadata: dict[str, str], items: Sequence[StoredItem]
    ) -> Conversation: ...

    async def get(self, conversation_id: str, owner: bytes) -> Conversation: ...

    async def update(self, conversation_id: str, owner: bytes, metadata: dict[str, str]) -> Conversation: ...

    async def delete(self, conversation_id: str, owner: bytes) -> None: ...

    async def history(self, conversation_id: str, owner: bytes) -> list[StoredItem]:
        """Returns every item, oldest first. Raises ``ContextLengthError`` when they are beyond any window."""
        ...

    async def page(
        self, conversation_id: str, owner: bytes, *, after: str | None, limit: int, newest_first: bool
    ) -> ItemPage: ...

    async def item(self, conversation_id: str, owner: bytes, item_id: str) -> StoredItem | None: ...

    async def append(
        self, conversation_id: str, owner: bytes, items: Sequence[StoredItem]
    ) -> list[StoredItem]:
        """Returns the items as they are stored: one whose id was taken has a new one."""
        ...

    async def remove(self, conversation_id: str, owner: bytes, item_id: str) -> Conversation | None:
        """Returns the conversation without the item; None if the item was not there."""
        ...

    async def take(self, conversation_id: str, owner: bytes, server_id: str) -> Lease: ...

    async def release(self, lease: Lease, items: Sequence[StoredItem] = ()) -> None:
        """End the lease, after appending ``items``. A conversation that is gone is not an error."""
        ...


class Completions(Protocol):
    """Chat completions that were asked to be stored."""

    async def put(self, made: StoredCompletion, owner: bytes) -> None:
        """Durable when it returns."""
        ...

    async def get(self, completion_id: str, owner: bytes) -> StoredCompletion | None: ...

    async def update(
        self, completion_id: str, owner: bytes, metadata: dict[str, str]
    ) -> StoredCompletion | None:
        """Returns it with other metadata; None if it is not there."""
        ...

    async def delete(self, completion_id: str, owner: bytes) -> bool:
        """Returns whether it was there."""
        ...

    async def page(self, owner: bytes, wanted: CompletionFilter) -> tuple[list[dict[str, Any]], bool] | None:
        """Returns (completions, whether more follow), or None if there is no completion ``wanted.after``."""
        ...
