"""InFlightRequests: one client's requests in the engine, and the delivery of their chunks.

Runs on the event loop's thread; uses no sockets, and only the clock that is passed in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from chorale.client.admission import Admission
from chorale.client.stream import ChunkSink, OnClose, RequestStream
from chorale.engine.types import GenerateRequest, TokenChunk
from chorale.errors import ChoraleError, ConflictError


class InFlightRequest:
    """One request: its stream, its open choices, and the time since when its reader has been behind."""

    __slots__ = ("behind_since", "num_waiting", "open_choices", "owner", "stream")

    def __init__(self, stream: ChunkSink, request: GenerateRequest) -> None:
        self.stream, self.owner = stream, request.owner
        self.open_choices = set(range(request.sampling.n))
        self.behind_since: float | None = None
        self.num_waiting = len(request.prompt_token_ids)  # prompt tokens; 0 after the first output token


class InFlightRequests:
    """``admission`` counts choices and prompt tokens; the clients of a fleet share one ``Admission``."""

    def __init__(self, clock: Callable[[], float], admission: Admission | None = None) -> None:
        self.admission = admission or Admission(clock)
        self.num_in_flight = 0
        self._entries: dict[str, InFlightRequest] = {}
        self._clock = clock

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def ids(self) -> list[str]:
        return list(self._entries)

    def admit(self, request: GenerateRequest, on_close: OnClose) -> RequestStream:
        """Admit a request and return its stream. Raises as ``Admission.admit``, or ``ConflictError``."""
        request_id = request.request_id
        if request_id in self._entries:
            raise ConflictError(f"a request with the id {request_id} is already running")
        self.admission.admit(request)
        stream = RequestStream(request_id, request.sampling.n, on_close)
        self.adopt(stream, request)
        return stream

    def adopt(self, stream: ChunkSink, request: GenerateRequest) -> None:
        """Add a request that has already been admitted."""
        self._entries[stream.request_id] = entry = InFlightRequest(stream, request)
        self.admission.num_prompt_tokens += entry.num_waiting
        self.num_in_flight += request.sampling.n

    def deliver(self, chunks: Iterable[TokenChunk]) -> None:
        """Push chunks to their streams. Chunks of removed requests and closed choices are dropped."""
        entries = self._entries
        for chunk in chunks:
            entry = entries.get(chunk.request_id)
            if entry is None or chunk.index not in entry.open_choices:
                continue
            if entry.num_waiting:
                self._prompt_done(entry)
            if chunk.finish_reason is not None:
                self._choice_ended(entry, chunk.request_id, chunk.index)
            entry.stream.push(chunk)

    def _prompt_done(self, entry: InFlightRequest) -> None:
        self.admission.num_prompt_tokens -= entry.num_waiting
        entry.num_waiting = 0

    def _choice_ended(self, entry: InFlightRequest, request_id: str, index: int) -> None:
        entry.open_choices.discard(index)
        self.num_in_flight -= 1
        self.admission.choice_ended(entry.owner)
        if not entry.open_choices:
            self._prompt_done(entry)
            del self._entries[request_id]

    def remove(self, request_id: str) -> InFlightRequest | None:
        """Remove a request and return it, or None if it is unknown. Its later chunks are dropped."""
        entry = self._entries.pop(request_id, None)
        if entry is not None:
            self._forget(entry)
        return entry

    def _forget(self, entry: InFlightRequest) -> None:
        self._prompt_done(entry)
        self.num_in_flight -= len(entry.open_choices)
        self.admission.forget(len(entry.open_choices), entry.owner)

    def leave(self, request_id: str, index: int | None) -> bool:
        """Remove a request, or one of its choices, because its consumer left. Returns False if not open."""
        if index is None:
            return self.remove(request_id) is not None
        entry = self._entries.get(request_id)
        if entry is None or index not in entry.open_choices:
            return False
        self._choice_ended(entry, request_id, index)
        return True

    def abort(self, request_id: str) -> bool:
        """End a request's stream with finish_reason "abort", at once. Returns False if it is unknown."""
        entry = self.remove(request_id)
        if entry is None:
            return False
        for index in sorted(entry.open_choices):
            entry.stream.push(TokenChunk(request_id, index, [], finish_reason="abort"))
        return True

    def fail_all(self, make_error: Callable[[], ChoraleError]) -> None:
        """End every stream, each with its own error object, because the engine is lost."""
        entries, self._entries = list(self._entries.values()), {}
        for entry in entries:
            self._forget(entry)
            entry.stream.fail(make_error())

    def slow_readers(self, max_pending_tokens: int, patience: float) -> list[str]:
        """Return the requests that have had more than ``max_pending_tokens`` unread tokens for ``patience``
        seconds."""
        now, slow = self._clock(), []
        for request_id, entry in self._entries.items():
            if entry.stream.num_pending_tokens <= max_pending_tokens:
                entry.behind_since = None
            elif entry.behind_since is None:
                entry.behind_since = now
            elif now - entry.behind_since >= patience:
                slow.append(request_id)
        return slow
