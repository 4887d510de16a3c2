"""MeteredClient: an engine client for the endpoints that counts every request and token.

Counting in the client covers all endpoints in the same way.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import msgspec

from chorale.api.telemetry.engine_record import EngineRecord
from chorale.api.telemetry.generation_span import CLIENT_LEFT, GenerationSpan
from chorale.api.telemetry.metrics import Metrics
from chorale.client.base import EngineClient, TokenStream
from chorale.engine.types import NOBODY, ChunkTimings, GenerateRequest, Owner, TokenChunk
from chorale.errors import ChoraleError, QueueFullError
from chorale.tracing.context import recording


class MeteredClient:
    """Wraps an ``EngineClient``. ``owner`` returns the owner of the current request."""

    __slots__ = ("_client", "_is_batch", "_metrics", "_owner")

    def __init__(
        self, client: EngineClient, metrics: Metrics, owner: Callable[[], Owner] = lambda: NOBODY
    ) -> None:
        self._client, self._metrics, self._owner = client, metrics, owner
        self._is_batch = False

    def of_batches(self) -> EngineClient:
        """Returns a client for requests of batches, which yield to all other requests."""
        made = MeteredClient(self._client, self._metrics, self._owner)
        made._is_batch = True
        return cast("EngineClient", made)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def reserve(self, num_choices: Mapping[str, int], owner: Owner = NOBODY) -> None:
        with self._counting_rejections():
            self._client.reserve(num_choices, self._owner())

    @contextlib.contextmanager
    def _counting_rejections(self) -> Iterator[None]:
        try:
            yield
        except QueueFullError as error:
            self._metrics.rejected(error)
            raise

    def submit(self, request: GenerateRequest) -> TokenStream:
        request = msgspec.structs.replace(request, owner=self._owner(), is_batch=self._is_batch)
        with self._counting_rejections():
            stream = self._client.submit(request)
        if request.is_batch:  # its latencies would distort those of interactive requests
            return stream
        traced = recording()
        span = GenerationSpan(request, traced) if traced is not None else None
        return MeteredStream(stream, request, self._client, self._metrics, span)


class MeteredStream:
    """Wraps a ``TokenStream``. Per-choice lists are indexed by choice. ``span``: None without tracing."""

    __slots__ = (
        "_arrival", "_client", "_first", "_itl", "_last", "_max_tokens", "_metrics", "_num_computed",
        "_num_prompt", "_num_tokens", "_open", "_read", "_record", "_span", "_stream", "_view",
    )  # fmt: skip

    def __init__(
        self,
        stream: TokenStream,
        request: GenerateRequest,
        client: EngineClient,
        metrics: Metrics,
        span: GenerationSpan | None,
    ) -> None:
        n = request.sampling.n
        self._span = span
        self._stream, self._client, self._metrics = stream, client, metrics
        self._arrival = request.arrival_time or time.time()
        self._first, self._last, self._num_tokens = [0.0] * n, [0.0] * n, [0] * n
        self._open = set(range(n))
        # Prompt tokens without the cached ones; None until the prompt has been computed.
        self._num_computed: int | None = None
        self._num_prompt, self._max_tokens = len(request.prompt_token_ids), request.sampling.max_tokens
        self._record: EngineRecord | None = None  # record of the serving engine, once it is known

    def _begin(self) -> EngineRecord:
        """Counts the request for its engine, which is known once chunks arrive or the stream ends."""
        engine = self._stream.engine
        self._record = record = self._metrics.record(engine)
        self._view = self._client.engines[engine]
        observe = record.histograms
        self._itl = observe["vllm:inter_token_latency_seconds"]
        observe["vllm:request_prompt_tokens"].observe(self._num_prompt)
        observe["vllm:request_params_n"].observe(len(self._num_tokens))
        if self._max_tokens is not None:
            observe["vllm:request_params_max_tokens"].observe(self._max_tokens)
        return record

    @property
    def engine(self) -> int:
        return self._stream.engine

    def __aiter__(self) -> MeteredStream:
        return self

    async def __anext__(self) -> list[TokenChunk]:
        try:
            chunks = await self._stream.__anext__()
        except ChoraleError as error:
            self._end_all("error", "engine")
            self._end_span(error.code or type(error).__name__)
            raise
        except StopAsyncIteration:
            self._end_span()
            raise
        now = time.time()
        record = self._record or self._begin()
        for chunk in chunks:
            self._observe(chunk, now, record)
            if self._span is not None:
                self._span.observe(chunk)
        record.observe(self._view.stats)
        return chunks

    async def aclose(self) -> None:
        if self._open:
            # Closed early: the request was cancelled (the client disconnected), or a stop string matched.
            leaving = isinstance(sys.exception(), GeneratorExit | asyncio.CancelledError)
            self._end_all("abort" if leaving else "stop", "disconnect" if leaving else None)
            self._end_span(CLIENT_LEFT if leaving else None)
        self._end_span()
        await self._stream.aclose()

    def _end_span(self, error: str | None = None) -> None:
        if self._span is not None:
            self._span.end(self.engine, error)

    def read_directly(self, read: Callable[[TokenChunk], bool]) -> None:
        if self._span is None:  # a span must observe every chunk
            self._read = read
            self._stream.read_directly(self._read_metered)

    def _read_metered(self, chunk: TokenChunk) -> bool:
        record = self._record
        if record is None or not self._read(chunk):
            return False
        self._observe(chunk, time.time(), record)
        if (stats := self._view.stats) is not record.last_stats:
            record.observe(stats)
        return True

    def drop(self, index: int) -> None:
        """Ends a choice early because of its text, for example at a stop string."""
        if index in self._open:
            self._end(index, "stop", None)
        self._stream.drop(index)

    def _observe(self, chunk: TokenChunk, now: float, record: EngineRecord) -> None:
        index = chunk.index
        if count := len(chunk.token_ids):
            if self._num_tokens[index]:
                # Tokens of an accepted draft arrive together: the elapsed time is divided among them.
                self._itl.observe((now - self._last[index]) / count, count)
            else:
                self._first[index] = now
                record.histograms["vllm:time_to_first_token_seconds"].observe(now - self._arrival)
                if self._num_computed is None:
                    self._num_computed = self._num_prompt - chunk.num_cached_tokens
            self._num_tokens[index] += count
            self._last[index] = now
        if chunk.num_cached_tokens and index == 0:  # choices share one prompt, which is counted once
            record.series.count("vllm:prompt_tokens_cached", (), chunk.num_cached_tokens)
        if chunk.finish_reason is not None and index in self._open:
            self._end(index, chunk.finish_reason, "engine" if chunk.finish_reason == "abort" else None)
            if chunk.timings is not None:
                observe_timings(chunk.timings, record)

    def _end_all(self, reason: str, abort: str | None) -> None:
        for index in sorted(self._open):
            self._end(index, reason, abort)

    def _end(self, index: int, reason: str, abort: str | None) -> None:
        self._open.discard(index)
        record = self._record or self._begin()
        series, observe = record.series, record.histograms
        series.count("vllm:request_success", (reason,))
        if abort is not None:
            series.count("chorale:aborts", (abort,))
        num_tokens = self._num_tokens[index]
        observe["vllm:request_generation_tokens"].observe(num_tokens)
        if not self._open:
            observe["vllm:request_max_num_generation_tokens"].observe(max(self._num_tokens))
            if self._num_computed is not None:
                observe["vllm:request_prefill_kv_computed_tokens"].observe(self._num_computed)
        observe["vllm:e2e_request_latency_seconds"].observe(time.time() - self._arrival)
        if num_tokens > 1:
            per_token = (self._last[index] - self._first[index]) / (num_tokens - 1)
            observe["vllm:request_time_per_output_token_seconds"].observe(per_token)


def observe_timings(timings: ChunkTimings, record: EngineRecord) -> None:
    if not timings.first_scheduled:
        return  # aborted in the queue
    observe = record.histograms
    observe["vllm:request_num_preemptions"].observe(timings.num_preemptions)
    spans = {
        "queue": timings.first_scheduled - timings.arrival,
        "prefill": timings.first_token - timings.first_scheduled,
        "decode": timings.last_token - timings.first_token,
        "inference": timings.last_token - timings.first_scheduled,
    }
    for name, seconds in spans.items():
        observe[f"vllm:request_{name}_time_seconds"].observe(max(0.0, seconds))
