"""GenerationSpan: the span of one generation round of a traced request."""

from __future__ import annotations

import time

from chorale.engine.types import ChunkTimings, GenerateRequest, SamplingSpec, TokenChunk
from chorale.tracing.context import RequestContext
from chorale.tracing.otel import Span
from chorale.tracing.record import Round

CLIENT_LEFT = "client_disconnected"


class GenerationSpan:
    """Begins at submission and ends with ``end``, which is called however the stream ends."""

    __slots__ = ("_arrival", "_ended", "_reasons", "_record", "_round", "_span")

    def __init__(self, request: GenerateRequest, traced: RequestContext) -> None:
        assert traced.span is not None
        self._record = traced.record
        self._arrival = request.arrival_time or time.time()
        self._reasons, self._ended = list[str](), False
        self._round = Round(len(request.prompt_token_ids), num_choices=request.sampling.n)
        if not traced.record.rounds:
            traced.record.response_id = traced.record.response_id or request.request_id
            traced.record.arrival = self._arrival
            traced.record.sampling = sampling_attributes(request.sampling)
        traced.record.rounds.append(self._round)
        self._span = traced.span.child("generate", {"gen_ai.request.id": request.request_id})

    def observe(self, chunk: TokenChunk) -> None:
        done = self._round
        if chunk.token_ids and done.seconds_to_first_token is None:
            done.seconds_to_first_token = time.time() - self._arrival
        done.num_output += len(chunk.token_ids)
        if chunk.index == 0:
            done.num_cached += chunk.num_cached_tokens
        if chunk.finish_reason is not None:
            self._reasons.append(chunk.finish_reason)
            if chunk.timings is not None:
                _take_timings(done, chunk.timings)
                self._span.set({"chorale.num_preemptions": chunk.timings.num_preemptions or None})

    def end(self, engine: int, error: str | None = None) -> None:
        """Ends the span. Idempotent. ``error``: the error code if the round failed."""
        if self._ended:
            return
        self._ended = True
        if error is not None:
            self._record.error = error
            fail(self._span, error)
        reasons = tuple(self._reasons) or None
        self._span.set({"chorale.engine": engine, "gen_ai.response.finish_reasons": reasons})
        self._span.set(self._round.attributes())
        self._span.end()


def fail(span: Span, error: str) -> None:
    """Records an error. A client's disconnect does not mark the span as failed."""
    if error == CLIENT_LEFT:
        span.set({"error.type": error})
    else:
        span.fail(error)


def _take_timings(done: Round, timings: ChunkTimings) -> None:
    """Copies the times of a choice. The choice that ends last overwrites the others: it decoded longest."""
    if not timings.first_scheduled:
        return  # aborted in the queue
    done.queue = max(0.0, timings.first_scheduled - timings.arrival)
    done.prefill = max(0.0, timings.first_token - timings.first_scheduled)
    done.decode = max(0.0, timings.last_token - timings.first_token)


def sampling_attributes(sampling: SamplingSpec) -> dict[str, float | int | None]:
    """Returns the sampling parameters as attributes; None leaves out those without effect."""
    return {
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.top_k": sampling.top_k or None,
        "gen_ai.request.max_tokens": sampling.max_tokens,
        "gen_ai.request.frequency_penalty": sampling.frequency_penalty or None,
        "gen_ai.request.presence_penalty": sampling.presence_penalty or None,
        "gen_ai.request.seed": sampling.seed,
        "gen_ai.request.choice.count": sampling.n if sampling.n > 1 else None,
        "gen_ai.request.n": sampling.n,
    }
