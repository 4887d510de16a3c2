"""RequestStream: the receiving end of one request, used by every EngineClient.

The client pushes chunks on the thread of the event loop; the consumer awaits them. It is woken once per batch
of chunks, not once per token.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from chorale.engine.types import TokenChunk
from chorale.errors import ChoraleError

# Called with (request id, choice or None for all) when the consumer leaves before the end.
OnClose = Callable[[str, int | None], None]


class ChunkSink(Protocol):
    """The sending end of a stream, to which a ``RemoteClient`` pushes chunks."""

    engine: int

    @property
    def request_id(self) -> str: ...

    @property
    def num_pending_tokens(self) -> int: ...

    def push(self, chunk: TokenChunk) -> None: ...

    def fail(self, error: ChoraleError) -> None: ...


class RequestStream:
    """Async iterator of chunk batches; see ``TokenStream``. Not thread-safe: one event loop only."""

    __slots__ = (
        "_direct", "_error", "_finished", "_on_close", "_open", "_pending", "_waiter", "engine", "request_id",
    )  # fmt: skip

    def __init__(self, request_id: str, num_choices: int, on_close: OnClose) -> None:
        self.request_id = request_id
        self.engine = 0
        self._open = set(range(num_choices))
        self._on_close = on_close
        self._pending: list[TokenChunk] = []
        self._error: ChoraleError | None = None
        self._finished = False
        self._waiter: asyncio.Future[None] | None = None  # set while the consumer waits, with nothing pending
        self._direct: Callable[[TokenChunk], bool] | None = None

    @property
    def num_unfinished(self) -> int:
        """Number of choices whose final chunk has not arrived."""
        return len(self._open)

    @property
    def num_pending_tokens(self) -> int:
        """Number of tokens that have arrived and have not been read."""
        return sum(len(chunk.token_ids) for chunk in self._pending)

    def read_directly(self, read: Callable[[TokenChunk], bool]) -> None:
        self._direct = read

    def push(self, chunk: TokenChunk) -> None:
        if chunk.finish_reason is not None:
            self._open.discard(chunk.index)
        elif self._waiter is not None and self._direct is not None and self._direct(chunk):
            return
        self._pending.append(chunk)
        self._wake()

    def fail(self, error: ChoraleError) -> None:
        """End the stream with an error, once the pending chunks are read."""
        self._error = error
        self._open.clear()
        self._wake()

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():  # done: the consumer was cancelled
            waiter.set_result(None)

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> list[TokenChunk]:
        while not self._pending:
            if not self._open or self._finished:
                self._finished = True
                raise self._error or StopAsyncIteration()
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        pending, self._pending = self._pending, []
        return pending

    async def aclose(self) -> None:
        """Leave early: abort the request unless it has ended. Idempotent."""
        was_finished, self._finished = self._finished, True
        if self._open and not was_finished:
            self._on_close(self.request_id, None)

    def drop(self, index: int) -> None:
        """Leave one choice early: abort it unless it has ended. Idempotent."""
        if index in self._open and not self._finished:
            self._open.discard(index)
            self._on_close(self.request_id, index)
            if not self._open:
                self._wake()  # ends a read in another task
