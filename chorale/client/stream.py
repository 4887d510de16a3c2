"""RequestStream: the receiving end of one request, shared by every EngineClient.

The owner pushes chunks from the event loop's own thread; the consumer awaits. A wake-up happens once per
batch of chunks, not once per token.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from chorale.engine.types import TokenChunk
from chorale.errors import ChoraleError


class RequestStream:
    """Async iterator of chunk batches; see ``TokenStream``. Not thread-safe: one event loop only."""

    __slots__ = ("_error", "_finished", "_num_unfinished", "_on_close", "_pending", "_waiter", "request_id")

    def __init__(self, request_id: str, num_choices: int, on_close: Callable[[str], None]) -> None:
        self.request_id = request_id
        self._num_unfinished = num_choices
        self._on_close = on_close  # called with the id when the consumer leaves before the end
        self._pending: list[TokenChunk] = []
        self._error: ChoraleError | None = None
        self._finished = False
        self._waiter: asyncio.Future[None] | None = None

    @property
    def num_unfinished(self) -> int:
        """Choices whose final chunk has not arrived."""
        return self._num_unfinished

    @property
    def num_pending_tokens(self) -> int:
        """Tokens that arrived and were not read: how far behind a slow reader is."""
        return sum(len(chunk.token_ids) for chunk in self._pending)

    def push(self, chunk: TokenChunk) -> None:
        self._pending.append(chunk)
        if chunk.finish_reason is not None:
            self._num_unfinished -= 1
        self._wake()

    def fail(self, error: ChoraleError) -> None:
        """End the stream with an error, after whatever is pending was read."""
        self._error = error
        self._num_unfinished = 0
        self._wake()

    def _wake(self) -> None:
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> list[TokenChunk]:
        while not self._pending:
            if self._error is not None:
                self._finished = True
                raise self._error
            if self._num_unfinished <= 0 or self._finished:
                self._finished = True
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        pending, self._pending = self._pending, []
        return pending

    async def aclose(self) -> None:
        """Leave early: aborts the request unless it has already ended. Idempotent."""
        if self._finished:
            return
        self._finished = True
        if self._num_unfinished > 0:
            self._on_close(self.request_id)
