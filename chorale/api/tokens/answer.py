"""Body and chunks of /inference/v1/generate, in vLLM's form."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from contextlib import aclosing
from typing import Any

from chorale.api.answer import Answer, Ends, Folds
from chorale.api.fields import wants_continuous_usage, wants_usage
from chorale.api.http.sse import DONE, event, last_error
from chorale.api.logprobs import LEAST, LogprobsWriter
from chorale.api.routed_experts import expert_field
from chorale.api.state import ServerState
from chorale.api.tokens.request import GenerateRequest
from chorale.api.usage import metrics_object, of_choices, usage_object, version_field
from chorale.engine.types import TokenLogprobs
from chorale.turns.direct import Direct
from chorale.turns.events import ItemDelta, OutputEvent, TurnEnded, TurnProgress
from chorale.turns.request import TurnRequest
from chorale.turns.run import Batches, run_raw


def token_scores(entries: Iterable[TokenLogprobs]) -> dict[str, Any]:
    """Returns log-probabilities by token id: at each position the token itself, then the others by rank."""
    return {"content": [_scored(entry) for entry in entries]}


def _scored(entry: TokenLogprobs) -> dict[str, Any]:
    top = [
        {"token_id": token_id, "logprob": max(logprob, LEAST), "rank": rank}
        for rank, (token_id, logprob) in enumerate(zip(entry.top_ids, entry.top_logprobs, strict=True), 1)
    ]
    own = {"token_id": entry.token_id, "logprob": max(entry.logprob, LEAST), "rank": entry.rank}
    # Tokens of equal probability have one rank; the list has one place for each.
    first = next((each for each in top if each["token_id"] == entry.token_id), None)
    others = [each for each in top if each is not first]
    return {**own, "top_logprobs": [first or {**own, "rank": max(entry.rank, len(top) + 1)}, *others]}


class TokenAnswer(Answer):
    """What all parts of one answer share. ``answer_id``: as the client sees it; ``owner``: of the request."""

    def __init__(
        self, state: ServerState, asked: GenerateRequest, turn: TurnRequest, answer_id: str, owner: bytes
    ) -> None:
        self.id, self.turns = answer_id, (turn,)
        self._turn, self._mode, self._owner = turn, asked.output_mode, owner
        self.state, self.asked = state, asked
        named = bool(asked.sampling_params.logprob_token_ids)
        self._writer = LogprobsWriter(state.vocab, state.config.tokens_as_ids, named)
        self._created = int(time.time())
        self._prompt_token_ids = asked.token_ids if asked.return_token_ids else None

    async def run(self, state: ServerState, turn: TurnRequest, direct: Direct | None) -> Batches:
        running, asked = state.lifecycle.generations, self.asked
        running[turn.request_id] = self._owner, self.id
        turns = run_raw(
            state.client,
            state.vocab,
            turn,
            skip_special_tokens=asked.sampling_params.skip_special_tokens,
            in_final=asked.is_chat and self._mode != "text",
        )
        try:
            async with aclosing(turns):
                async for batch in turns:
                    yield batch
        finally:
            del running[turn.request_id]

    def body(self, folds: Folds) -> dict[str, Any]:
        ends = [fold.ended for fold in folds[0] if fold.ended is not None]
        for ended in ends:
            if ended.error is not None:
                raise ended.error
        choices = [
            self.choice(index, ended, list(ended.output_token_ids), fold.scores, fold.text("message"))
            for index, (fold, ended) in enumerate(zip(folds[0], ends, strict=True))
        ]
        scored = ends[0].prompt_logprobs
        shown = self.state.shown_metrics()
        return {
            "request_id": self.id,
            "model": self.state.model_names[0],
            "created": self._created,
            "usage": usage_object(of_choices([ended.usage for ended in ends])),
            "prompt_logprobs": None if scored is None else self._writer.prompt(scored),
            "prompt_token_id_logprobs": None,
            "prompt_token_ids": self._prompt_token_ids,
            "mm_placeholders": None,
            "metrics": metrics_object(ends[0], shown) if shown.any and len(ends) == 1 else None,
            "kv_transfer_params": None,
            "ec_transfer_params": None,
            "output_mode": self._mode,
            "choices": choices,
        }

    def choice(
        self,
        index: int,
        ended: TurnEnded | None,
        token_ids: Sequence[int],
        logprobs: Sequence[TokenLogprobs],
        text: str,
    ) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": index,
            "finish_reason": None if ended is None else ended.reason,
            "stop_reason": None if ended is None else ended.stop_reason,
            "token_ids": token_ids,
            "routed_experts": None,
            "sampling_mask": None,
            "weight_versions": None if ended is None else version_field(ended)["weight_versions"],
            "logprobs": None,
        }
        num_top = self.asked.sampling_params.num_logprobs
        if num_top is not None and self._mode == "tokens":
            choice["logprobs"] = token_scores(logprobs)
        elif num_top is not None:
            choice["logprobs"] = self._writer.chat(logprobs, num_top)
        if ended is not None:
            choice |= expert_field(self._turn, ended)
        return choice if self._mode == "tokens" else {**choice, "text": text}

    def writer(self, position: int, index: int) -> TokenWriter:
        return TokenWriter(self, index)

    @property
    def has_usage(self) -> bool:
        """Returns whether every chunk contains the usage so far."""
        return wants_continuous_usage(self.asked.stream_options)

    def conclusion(self, ends: Ends, record: dict[str, Any]) -> bytes:
        for ended in ends[0]:
            if ended.error is not None:
                return last_error(ended.error)
        if not wants_usage(self.asked.stream_options):
            return DONE
        return self.event([], usage_object(of_choices([ended.usage for ended in ends[0]]))) + DONE

    def event(self, choices: list[dict[str, Any]], usage: dict[str, Any] | None) -> bytes:
        """The first chunk contains the prompt's token ids if they were requested."""
        chunk: dict[str, Any] = {
            "request_id": self.id,
            "usage": usage,
            "output_mode": self._mode,
            "choices": choices,
        }
        if self._prompt_token_ids is not None:
            chunk["prompt_token_ids"], self._prompt_token_ids = self._prompt_token_ids, None
        return event(chunk)


class TokenWriter:
    """Writes the chunks of a choice."""

    def __init__(self, answer: TokenAnswer, index: int) -> None:
        self._answer, self._index = answer, index
        self.ended: TurnEnded | None = None

    def feed(self, events: Sequence[OutputEvent]) -> bytes:
        """Returns one chunk for all events, or b"" if there is nothing to send."""
        token_ids: list[int] = []
        logprobs: list[TokenLogprobs] = []
        text, usage = "", None
        for item in events:
            if isinstance(item, TurnProgress):
                token_ids += item.token_ids
                logprobs += item.logprobs
                usage = usage_object(item.usage) if self._answer.has_usage else None
            elif isinstance(item, ItemDelta):
                text += item.text
            elif isinstance(item, TurnEnded):
                self.ended = item
        ended = self.ended
        if (ended is not None and ended.error is not None) or not (token_ids or text or ended):
            return b""
        return self._answer.event([self._answer.choice(self._index, ended, token_ids, logprobs, text)], usage)
