"""A fake engine core that generates the token ids given by a test, for use with the real ``LLM``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from chorale import LLM
from chorale.client.base import EngineInfo
from chorale.engine.types import EngineStats, GenerateRequest, TokenChunk, TokenLogprobs
from chorale.serve.engine import build


class ScriptedCore:
    """Request ``i`` generates ``rounds[i]``, later ones ``rounds[-1]``, with ``size`` tokens per step."""

    def __init__(self, info: EngineInfo, rounds: Sequence[Sequence[int]], size: int) -> None:
        self.requests: list[GenerateRequest] = []
        self.aborted: list[tuple[str, int | None]] = []
        self._info, self._rounds, self._size = info, rounds, size
        self._left: dict[tuple[str, int], list[int]] = {}

    @property
    def has_work(self) -> bool:
        return bool(self._left)

    def add_request(self, request: GenerateRequest) -> None:
        script = self._rounds[min(len(self.requests), len(self._rounds) - 1)]
        self.requests.append(request)
        for index in range(request.sampling.n):
            self._left[request.request_id, index] = list(script)

    def abort(self, request_id: str, index: int | None = None) -> None:
        self.aborted.append((request_id, index))
        for key in [key for key in self._left if key[0] == request_id and index in (None, key[1])]:
            del self._left[key]

    def step(self) -> list[TokenChunk]:
        return [self._next(*key) for key in list(self._left)]

    def _next(self, request_id: str, index: int) -> TokenChunk:
        sampling = next(each for each in self.requests if each.request_id == request_id).sampling
        left = self._left[request_id, index]
        tokens, left[: self._size] = left[: self._size], []
        ends = set(sampling.stop_token_ids) | set(() if sampling.ignore_eos else self._info.eos_token_ids)
        chunk = TokenChunk(request_id, index, tokens)
        stop = next((position for position, token in enumerate(tokens) if token in ends), None)
        if stop is not None:
            chunk.token_ids, chunk.finish_reason = tokens[: stop + 1], "stop"
            chunk.stop_token_id = tokens[stop]
        elif not left:
            chunk.finish_reason = "length"
        if sampling.logprobs is not None:
            chunk.logprobs = [TokenLogprobs(token, -1.0, 1, [], []) for token in chunk.token_ids]
        if chunk.finish_reason is not None:
            del self._left[request_id, index]
        return chunk

    def use_idle_time(self) -> bool:
        return False

    def stats(self) -> EngineStats:
        return EngineStats()

    def shutdown(self) -> None:
        pass


@contextlib.contextmanager
def scripted_llm(
    monkeypatch: pytest.MonkeyPatch, *rounds: Sequence[int], size: int = 1, **info: Any
) -> Iterator[tuple[LLM, ScriptedCore]]:
    """Yield an LLM whose engine generates ``rounds``, and that engine."""
    full = EngineInfo(**{"model": "scripted", "max_model_len": 4096, "max_num_seqs": 8, **info})
    core = ScriptedCore(full, rounds, size)
    monkeypatch.setattr(build, "build_engine", lambda *_, **__: (core, full))
    with LLM() as llm:
        yield llm, core
