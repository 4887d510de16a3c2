"""What is kept of a response, and the face of the place that keeps it.

A stored response holds its own new input and its output, never its history: that is the chain of
``previous_id``. Branches therefore share their past and cannot disturb each other. Every item may carry the
harmony token ids behind it, for exact replay.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Protocol

from chorale.errors import ChoraleError, NotFoundError

Item = dict[str, Any]

RESPONSE_ID = re.compile(r"resp_[0-9a-f]{32}")
ITEM_ID = re.compile(r"[a-z]{2,4}_[0-9a-f]{32}")


class StoreError(ChoraleError):
    """The store could not do it (disk full, I/O error). A request is still answered; see the endpoint."""

    default_code = "store_error"


class PreviousResponseNotFoundError(NotFoundError):
    default_code = "previous_response_not_found"


@dataclass(frozen=True, slots=True)
class StoredItem:
    """An item as the API shows it, and the harmony message that the model produced for it (or nothing)."""

    item: Item
    token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """``body`` is the response object without its ``output`` (an empty list stands there)."""

    id: str
    owner: bytes  # hash of the API key, or empty: nobody else's requests see it
    previous_id: str | None
    created: float  # time.time()
    status: str
    body: dict[str, Any]
    input: tuple[StoredItem, ...]
    output: tuple[StoredItem, ...]

    def to_object(self) -> dict[str, Any]:
        """The response object as it was sent."""
        return {**self.body, "output": [stored.item for stored in self.output]}


@dataclass(frozen=True, slots=True)
class StoreStats:
    num_responses: int
    num_bytes: int
    num_failed_puts: int  # since this process started
    num_evicted: int  # the same


class ResponseStore(Protocol):
    """Coroutines that never block the event loop. ``StoreError`` where the disk fails."""

    async def put(self, response: StoredResponse) -> None:
        """Durable when it returns. The id must be new."""
        ...

    async def get(self, response_id: str, owner: bytes) -> StoredResponse | None: ...

    async def chain(self, response_id: str, owner: bytes) -> list[StoredItem]:
        """Input and output items of the response and of all before it, oldest first.

        Raises ``PreviousResponseNotFoundError`` when it, or one before it, is not there any more, and
        ``ContextLengthError`` when the chain is beyond any window.
        """
        ...

    async def items(self, item_ids: list[str], owner: bytes) -> dict[str, StoredItem]:
        """Those of the items that are stored, by id."""
        ...

    async def delete(self, response_id: str, owner: bytes) -> bool:
        """Whether it was there."""
        ...

    async def stats(self) -> StoreStats: ...

    async def close(self) -> None:
        """Finish what was accepted. Idempotent."""
        ...
