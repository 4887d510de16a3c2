"""Batch: the prompts of one call of ``LLM``. Chunks of all of them in, a RequestOutput for each out."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

from chorale.engine.types import GenerateRequest, SamplingSpec, TokenChunk
from chorale.harmony.vocab import RETURN, Vocabulary
from chorale.llm.outputs import ChoiceBuilder, PositionLogprobs, RequestOutput, position_logprobs
from chorale.llm.params import SamplingParams
from chorale.llm.prompts import Prompt


class Batch:
    """``take`` is called after every step with a chunk for each row: what it does for a plain one counts."""

    def __init__(self, vocab: Vocabulary) -> None:
        self.num_done = 0  # prompts of which every choice has ended
        self._vocab = vocab
        self._work: list[tuple[Prompt, SamplingSpec]] = []
        self._outputs: dict[str, RequestOutput] = {}
        self._choices: dict[str, list[ChoiceBuilder]] = {}
        self._num_open: dict[str, int] = {}  # choices of each prompt that have not ended

    def add(self, request_id: str, prompt: Prompt, params: SamplingParams, spec: SamplingSpec) -> None:
        choices = [ChoiceBuilder(index, params, self._vocab, RETURN) for index in range(params.n)]
        self._outputs[request_id] = RequestOutput(
            request_id, prompt.text, prompt.token_ids, [choice.output for choice in choices]
        )
        self._choices[request_id] = choices
        self._num_open[request_id] = params.n
        self._work.append((prompt, spec))

    def requests(self) -> Iterator[GenerateRequest]:
        for request_id, (prompt, spec) in zip(self._outputs, self._work, strict=True):
            yield GenerateRequest(
                request_id=request_id,
                prompt_token_ids=prompt.token_ids,
                sampling=spec,
                arrival_time=time.time(),
                cache_salt=prompt.cache_salt,
            )

    def take(self, chunks: list[TokenChunk]) -> list[tuple[str, int]]:
        """Read a step's chunks; returns the choices that a stop string has ended before the engine did."""
        left: list[tuple[str, int]] = []
        choices = self._choices
        for chunk in chunks:
            choice = choices[chunk.request_id][chunk.index]
            unread = choice.unread
            if unread is not None and chunk.finish_reason is None and chunk.logprobs is None:
                unread.token_ids += chunk.token_ids
            elif self._take(choice, chunk):
                left.append((chunk.request_id, chunk.index))
        return left

    def _take(self, choice: ChoiceBuilder, chunk: TokenChunk) -> bool:
        """Returns whether the engine still works on a choice that has ended."""
        if choice.output.finished():
            return False
        output = self._outputs[chunk.request_id]
        output.num_cached_tokens = max(output.num_cached_tokens, chunk.num_cached_tokens)
        if chunk.prompt_logprobs is not None:
            output.prompt_logprobs = self._prompt_logprobs(chunk.prompt_logprobs)
        is_last = chunk.finish_reason is not None
        if not choice.take(chunk):
            return False
        self._num_open[chunk.request_id] -= 1
        self.num_done += self._num_open[chunk.request_id] == 0
        return not is_last

    def _prompt_logprobs(self, found: Sequence[Any]) -> list[PositionLogprobs | None]:
        return [None if entry is None else position_logprobs(entry, self._vocab) for entry in found]

    def outputs(self) -> list[RequestOutput]:
        """In the order in which their prompts were added."""
        return list(self._outputs.values())
