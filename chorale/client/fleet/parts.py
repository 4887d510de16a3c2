"""The parts of a request of a fleet. A part is sent to one engine; all parts fill the same stream.

A request is one part until its engine is lost. Then each open choice becomes a separate part, which another
engine takes. The consumer reads one stream all the time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TypeAlias

import msgspec

from chorale.client.continuation import Continuation, continued, without_repeated
from chorale.client.fleet.members import Member, Ticket
from chorale.client.stream import RequestStream
from chorale.engine.types import GenerateRequest, TokenChunk
from chorale.errors import ChoraleError, EngineError

# Called when no choice of the part is open any more, or with the error that ended it early.
PartEnded: TypeAlias = "Callable[[Part, ChoraleError | None], None]"


class FleetRequest:
    """A request in flight: its stream, and the delivered tokens of each choice."""

    __slots__ = ("began", "delivered", "num_moves", "open", "parts", "request", "stream")

    def __init__(self, request: GenerateRequest, stream: RequestStream) -> None:
        count = request.sampling.n
        self.request, self.stream = request, stream
        self.delivered: list[list[int]] = [[] for _ in range(count)]
        self.began = [False] * count
        self.open = set(range(count))
        self.parts: list[Part] = []
        self.num_moves = 0  # how often an engine was lost

    def push(self, chunk: TokenChunk) -> None:
        """Deliver a chunk whose index counts the choices of the whole request."""
        index = chunk.index
        if index not in self.open:
            return
        self.began[index] = True
        self.delivered[index] += chunk.token_ids
        if chunk.finish_reason is not None:
            self.open.discard(index)
        self.stream.push(chunk)

    def successors(self, part: Part) -> list[Part]:
        """Returns the parts that replace a part whose engine is lost. Choices that are complete end."""
        self.num_moves += 1
        name = f"{self.request.request_id}+{self.num_moves}"
        if part.is_whole and len(part.open) == len(self.delivered) and not any(self.began):
            request = msgspec.structs.replace(self.request, request_id=name)
            return [Part(self, part.on_end, Continuation(request), tuple(sorted(part.open)))]
        found = []
        for index in sorted(part.open):
            rest = continued(
                self.request, index, self.delivered[index], f"{name}.{index}", began=self.began[index]
            )
            if rest is None:
                self.push(TokenChunk(self.request.request_id, index, [], finish_reason="length"))
            else:
                found.append(Part(self, part.on_end, rest, (index,)))
        return found


class Part:
    """The choices ``indices`` of a request, sent to one engine. ``RemoteClient`` uses it as ``ChunkSink``."""

    __slots__ = ("_again", "_plain", "indices", "on_end", "open", "parent", "place", "request", "sending")

    def __init__(
        self, parent: FleetRequest, on_end: PartEnded, asked: Continuation, indices: tuple[int, ...]
    ) -> None:
        self.parent, self.on_end, self.request = parent, on_end, asked.request
        self.indices = indices  # index within the part -> index within the request
        self.open = set(indices)
        self.sending: asyncio.Task[None] | None = None  # finds an engine and sends the request there
        self.place: tuple[Member, Ticket] | None = None  # the engine that has it; None: it waits for one
        self._again: Sequence[int] = asked.again
        self._plain = not parent.num_moves

    @property
    def is_whole(self) -> bool:
        return len(self.indices) == self.request.sampling.n == self.parent.request.sampling.n

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def num_pending_tokens(self) -> int:
        return self.parent.stream.num_pending_tokens

    @property
    def engine(self) -> int:
        return self.parent.stream.engine

    @engine.setter
    def engine(self, index: int) -> None:
        if not any(self.parent.began):  # metrics count a request for the engine on which it began
            self.parent.stream.engine = index

    def push(self, chunk: TokenChunk) -> None:
        index = self.indices[chunk.index]
        if not self._plain:
            translated = self._translated(chunk, index)
            if translated is None:
                return
            chunk = translated
        if chunk.finish_reason is not None:
            self.open.discard(index)
        self.parent.push(chunk)
        if not self.open:
            self.on_end(self, None)

    def _translated(self, chunk: TokenChunk, index: int) -> TokenChunk | None:
        """Returns the chunk as the first engine would have sent it, or None if nothing is left to deliver."""
        if self._again:
            kept = without_repeated(chunk, self._again)
            if kept is None:
                message = "the engine was lost, and another engine sampled different tokens"
                self.on_end(self, EngineError(message, code="engine_restarted"))
                return None
            chunk, self._again = kept
            if not chunk.token_ids and chunk.finish_reason is None:
                return None
        began = self.parent.began[index]
        return msgspec.structs.replace(
            chunk,
            request_id=self.parent.request.request_id,
            index=index,
            num_cached_tokens=0 if began else chunk.num_cached_tokens,
        )

    def fail(self, error: ChoraleError) -> None:
        self.on_end(self, error)

    def leave(self, index: int) -> int | None:
        """Close a choice that its consumer left. Returns its index in the part, or None if it has ended."""
        if index not in self.open:
            return None
        self.open.discard(index)
        return self.indices.index(index)
