"""PendingGrammarQueue: requests whose grammars are being compiled while steps run."""

from __future__ import annotations

import concurrent.futures
from concurrent.futures import Future

from chorale.engine.types import GenerateRequest, GrammarService

NO_GRAMMARS = "this engine does not support grammars"
PATIENCE = 0.01  # seconds that an idle engine waits for a compilation before it reads its inbox again


class PendingGrammarQueue:
    """Requests in order of arrival. A compiled request does not wait for an earlier uncompiled one."""

    def __init__(self, service: GrammarService | None) -> None:
        self._service = service
        self._pending: dict[str, tuple[GenerateRequest, Future[str | None]]] = {}

    def __len__(self) -> int:
        return len(self._pending)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._pending

    def add(self, request: GenerateRequest) -> str | None:
        """Start compiling. Returns the reason why this engine cannot serve the request, or None."""
        sampling = request.sampling
        if self._service is None:
            return NO_GRAMMARS
        if not 0 <= sampling.grammar_context <= len(request.prompt_token_ids):
            return "grammar_context is longer than the prompt"
        start = len(request.prompt_token_ids) - sampling.grammar_context
        future = self._service.prepare(sampling, request.prompt_token_ids[start:])
        self._pending[request.request_id] = (request, future)
        return None

    def check(self, grammar: str) -> Future[str | None]:
        """Start compiling a grammar without a request."""
        if self._service is not None:
            return self._service.check(grammar)
        refused: Future[str | None] = Future()
        refused.set_result(NO_GRAMMARS)
        return refused

    def take_ready(self, *, wait: bool) -> list[tuple[GenerateRequest, str | None]]:
        """Remove the compiled requests and return them, each with None or the reason why it cannot be
        served."""
        if wait:
            futures = [future for _, future in self._pending.values()]
            concurrent.futures.wait(futures, PATIENCE, concurrent.futures.FIRST_COMPLETED)
        done = [(request, future) for request, future in self._pending.values() if future.done()]
        for request, _ in done:
            del self._pending[request.request_id]
        return [(request, _reason(future)) for request, future in done]

    def remove(self, request_id: str) -> GenerateRequest | None:
        entry = self._pending.pop(request_id, None)
        return None if entry is None else entry[0]

    def close(self) -> None:
        if self._service is not None:
            self._service.close()

    def remove_all(self) -> list[GenerateRequest]:
        dropped = [request for request, _ in self._pending.values()]
        self._pending.clear()
        return dropped


def _reason(future: Future[str | None]) -> str | None:
    """Return the result of a compilation. An exception of the compiler fails this request, not the engine."""
    error = future.exception()
    return future.result() if error is None else f"the grammar cannot be used: {type(error).__name__}"
