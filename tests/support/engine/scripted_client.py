"""ScriptedClient: an EngineClient whose tokens are written by hand in a test.

For adversarial content only (malformed harmony, deaths, full queues); wherever a real model can run, tests
use the real engine.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from chorale.client.base import EngineInfo, EngineStatus
from chorale.client.stream import RequestStream
from chorale.engine.commands import Command, Outcome
from chorale.engine.types import (
    NOBODY,
    ChunkTimings,
    EngineStats,
    FinishReason,
    GenerateRequest,
    Owner,
    TokenChunk,
    TokenLogprobs,
)
from chorale.errors import ChoraleError, EngineDeadError, EngineLoadingError, QueueFullError
from chorale.harmony.vocab import load_vocabulary


def ids(text: str) -> list[int]:
    """Returns the token ids of harmony text."""
    return load_vocabulary().encode_with_special(text)


@dataclass(slots=True)
class Script:
    """One choice: its tokens, cut into steps of ``tokens_per_step``, then the end or an error."""

    token_ids: Sequence[int]
    tokens_per_step: int = 1
    finish_reason: FinishReason | None = None  # None: "stop" if the last token is a stop id, else "length"
    num_cached_tokens: int = 0
    delay: float = 0.0  # seconds before each step; a test may change it while the script plays
    error: ChoraleError | None = None  # raised after the tokens, instead of an end
    hang: bool = False  # after the tokens, wait for an abort
    with_logprobs: bool = False


ScriptSource = Callable[[GenerateRequest, int], Script]
HELLO = (200005, 17196, 200008, 13225, 200002)  # <|channel|>final<|message|>Hello<|return|>


@dataclass(slots=True)
class ScriptedClient:
    """``source(request, choice_index)`` returns the script of each choice."""

    source: ScriptSource = lambda request, index: Script(HELLO)
    info_value: EngineInfo = field(
        default_factory=lambda: EngineInfo(model="scripted", max_model_len=131072, max_num_seqs=256)
    )
    status_value: EngineStatus = field(default_factory=lambda: EngineStatus("ready"))
    max_in_flight: int = 1024
    requests: list[GenerateRequest] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    dropped: list[tuple[str, int]] = field(default_factory=list)  # choices whose consumer left
    commands: list[Command] = field(default_factory=list)
    outcome: Outcome = field(default_factory=lambda: Outcome(is_paused=False, is_sleeping=False))
    reserved: dict[str, int] = field(default_factory=dict)  # request id -> choices
    change: Callable[[GenerateRequest, TokenChunk], None] | None = None  # of each chunk before it is sent
    _streams: dict[str, RequestStream] = field(default_factory=dict)
    _tasks: dict[str, list[asyncio.Task[None]]] = field(default_factory=dict)

    @property
    def info(self) -> EngineInfo:
        if self.status_value.state == "loading":
            raise EngineLoadingError("the engine is loading", retry_after=1)
        return self.info_value

    @property
    def status(self) -> EngineStatus:
        return self.status_value

    @property
    def stats(self) -> EngineStats:
        return EngineStats(num_running=len(self._streams))

    @property
    def engines(self) -> tuple[ScriptedClient, ...]:
        return (self,)

    @property
    def num_in_flight(self) -> int:
        return sum(stream.num_unfinished for stream in self._streams.values())

    def play(self, *texts: str | Script, **options: Any) -> None:
        """From now on, request ``i`` plays ``texts[i]``, further ones the last, with what it asks for.
        ``options``: those of ``Script``."""
        first = len(self.requests)

        def source(request: GenerateRequest, index: int) -> Script:
            number = next(n for n, each in enumerate(self.requests) if each is request) - first
            text = texts[min(number, len(texts) - 1)]
            if isinstance(text, Script):
                return text
            return Script(ids(text), **{"with_logprobs": request.sampling.logprobs is not None, **options})

        self.source = source

    def reserve(self, num_choices: Mapping[str, int], owner: Owner = NOBODY) -> None:
        self._require_room(sum(num_choices.values()))
        self.reserved.update(num_choices)

    def release(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            self.reserved.pop(request_id, None)

    def _require_room(self, num_choices: int) -> None:
        if self.status_value.state in ("dead", "failed"):
            raise EngineDeadError("the engine is restarting", retry_after=1)
        if self.num_in_flight + sum(self.reserved.values()) + num_choices > self.max_in_flight:
            raise QueueFullError("the queue is full", retry_after=1)

    def submit(self, request: GenerateRequest) -> RequestStream:
        if self.reserved.pop(request.request_id, None) is None:
            self._require_room(request.sampling.n)
        self.requests.append(request)
        stream = RequestStream(request.request_id, request.sampling.n, self.abort)
        self._streams[request.request_id] = stream
        self._tasks[request.request_id] = [
            asyncio.ensure_future(self._play(request, index, stream)) for index in range(request.sampling.n)
        ]
        return stream

    async def _play(self, request: GenerateRequest, index: int, stream: RequestStream) -> None:
        script = self.source(request, index)
        tokens, step = list(script.token_ids), script.tokens_per_step
        eos = self.info_value.eos_token_ids
        for start in range(0, max(len(tokens), 1), step):
            await asyncio.sleep(script.delay)
            part = tokens[start : start + step]
            final = start + step >= len(tokens) and script.error is None and not script.hang
            stopped = bool(part) and part[-1] in eos
            chunk = TokenChunk(
                request_id=request.request_id,
                index=index,
                token_ids=part,
                finish_reason=(script.finish_reason or ("stop" if stopped else "length")) if final else None,
                stop_token_id=part[-1] if final and stopped else None,
                logprobs=[TokenLogprobs(t, -0.5, 1, [t], [-0.5]) for t in part]
                if script.with_logprobs
                else None,
                num_cached_tokens=script.num_cached_tokens if start == 0 else 0,
                timings=ChunkTimings(request.arrival_time, 0.0, 0.0, 0.0, 0) if final else None,
            )
            if self.change is not None:
                self.change(request, chunk)
            stream.push(chunk)
        if script.error is not None:
            stream.fail(script.error)
        if script.hang:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.Event().wait()
                return
        if stream.num_unfinished <= 0:
            self._streams.pop(request.request_id, None)

    async def check_grammar(self, grammar: str) -> str | None:
        from chorale.grammar.matcher import check_grammar  # llguidance, for tests that need it

        try:
            await asyncio.to_thread(check_grammar, grammar)
        except ValueError as error:
            return str(error)
        return None

    async def control(self, command: Command) -> Outcome:
        self.commands.append(command)
        if command.action in ("pause", "sleep"):
            self.outcome = Outcome(is_paused=True, is_sleeping=command.action == "sleep")
        elif command.action in ("resume", "wake_up"):
            self.outcome = Outcome(is_paused=False, is_sleeping=False)
        return self.outcome

    def abort(self, request_id: str, index: int | None = None) -> None:
        """``index``: the choice whose consumer left; its stream gets no more chunks."""
        if index is not None:
            self.dropped.append((request_id, index))
            self._tasks[request_id][index].cancel()
            return
        stream = self._streams.pop(request_id, None)
        if stream is None:
            return
        self.aborted.append(request_id)
        for index, task in enumerate(self._tasks.pop(request_id, [])):
            if not task.done():
                task.cancel()
                stream.push(TokenChunk(request_id, index, [], finish_reason="abort"))

    async def close(self) -> None:
        for request_id in list(self._streams):
            self.abort(request_id)
