"""Generated tokens in place of an engine, so that the code of other endpoints makes an answer of them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

from chorale.api.state import ServerState
from chorale.client.base import EngineClient, EngineInfo
from chorale.engine.types import FinishReason, GenerateRequest, TokenChunk, TokenLogprobs

_STEP = 256  # tokens that are read without a pause
Played = Mapping[str, Sequence[TokenChunk]]  # id of the engine's request -> its chunks


def chunks_of(
    info: EngineInfo,
    index: int,
    token_ids: list[int],
    end: tuple[FinishReason | None, str | int | None],
    logprobs: list[TokenLogprobs] | None = None,
    num_cached: int = 0,
) -> list[TokenChunk]:
    """Returns a choice as the engine gives it. ``end``: ``finish_reason``, if any, and ``stop_reason``."""
    chunks = []
    for start in range(0, max(1, len(token_ids)), _STEP):
        part = slice(start, start + _STEP)
        scores = None if logprobs is None else logprobs[part]
        chunks.append(TokenChunk("", index, token_ids[part], logprobs=scores, num_cached_tokens=num_cached))
    chunks[-1].finish_reason, stop_reason = end
    if end[0] == "stop" and token_ids and token_ids[-1] in (stop_reason, *info.eos_token_ids):
        chunks[-1].stop_token_id = token_ids[-1]
    return chunks


class Paused(Exception):
    """A played stream has no more tokens, and has not ended."""


class Player:
    """The part of an ``EngineClient`` that turns use. Later rounds of a turn end without tokens.

    ``num_before``: chunks of a stream before those in which ``is_new``.
    """

    def __init__(self, state: ServerState, answers: Played, num_before: int = 0) -> None:
        self.info = state.client.info
        self.is_new = False
        self._answers, self._num_before = dict(answers), num_before
        self.state = replace(state, client=cast(EngineClient, self))

    def reserve(self, num_choices: Mapping[str, int]) -> None: ...

    def release(self, request_ids: object) -> None: ...

    def submit(self, request: GenerateRequest) -> _Stream:
        ends = [TokenChunk("", index, [], "stop") for index in range(request.sampling.n)]
        return _Stream(self, self._answers.pop(request.request_id, ends), self._num_before)


class _Stream:
    def __init__(self, player: Player, chunks: Sequence[TokenChunk], num_before: int) -> None:
        self._player, self._chunks, self._num_before, self._next = player, chunks, num_before, 0

    def __aiter__(self) -> _Stream:
        return self

    async def __anext__(self) -> list[TokenChunk]:
        await asyncio.sleep(0)
        if self._next == len(self._chunks):
            raise Paused
        self._player.is_new = self._player.is_new or self._next >= self._num_before
        self._next += 1
        return [self._chunks[self._next - 1]]

    async def aclose(self) -> None: ...

    def drop(self, index: int) -> None: ...

    def read_directly(self, read: Any) -> None: ...
