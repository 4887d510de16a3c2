"""Body and chunks of /inference/v1/generate, in vLLM's form."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any

from chorale.api.fields import wants_continuous_usage, wants_usage
from chorale.api.http.sse import event
from chorale.api.logprobs import LEAST, LogprobsWriter
from chorale.api.routed_experts import expert_field
from chorale.api.state import ServerState
from chorale.api.tokens.request import GenerateRequest
from chorale.api.usage import metrics_object, of_choices, usage_object, version_field
from chorale.engine.types import TokenLogprobs
from chorale.turns.events import ItemDelta, OutputEvent, TurnEnded, TurnProgress, Usage
from chorale.turns.request import TurnRequest


class Piece:
    """What the events of one choice add up to: a part of a stream, or everything."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.text = ""
        self.usage: Usage | None = None
        self.ended: TurnEnded | None = None

    def add(self, events: Iterable[OutputEvent]) -> None:
        for item in events:
            if isinstance(item, TurnProgress):
                self.token_ids += item.token_ids
                self.logprobs += item.logprobs
                self.usage = item.usage
            elif isinstance(item, ItemDelta):
                self.text += item.text
            elif isinstance(item, TurnEnded):
                self.ended = item


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


class TokenAnswer:
    """What all parts of one answer share. ``answer_id``: as the client sees it."""

    def __init__(self, state: ServerState, asked: GenerateRequest, turn: TurnRequest, answer_id: str) -> None:
        self.id = answer_id
        self.turn, self.mode = turn, asked.output_mode
        self._state, self._asked = state, asked
        named = bool(asked.sampling_params.logprob_token_ids)
        self._writer = LogprobsWriter(state.vocab, state.config.tokens_as_ids, named)
        self._created = int(time.time())
        self._prompt_token_ids = asked.token_ids if asked.return_token_ids else None

    def body(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        """Returns the body. Raises the ``ChoraleError`` with which a choice ended."""
        ends = [piece.ended for piece in pieces if piece.ended is not None]
        for ended in ends:
            if ended.error is not None:
                raise ended.error
        choices = [self._choice(index, piece) for index, piece in enumerate(pieces)]
        scored = ends[0].prompt_logprobs
        shown = self._state.shown_metrics()
        return {
            "request_id": self.id,
            "model": self._state.model_names[0],
            "created": self._created,
            "usage": usage_object(of_choices([ended.usage for ended in ends])),
            "prompt_logprobs": None if scored is None else self._writer.prompt(scored),
            "prompt_token_id_logprobs": None,
            "prompt_token_ids": self._prompt_token_ids,
            "mm_placeholders": None,
            "metrics": metrics_object(ends[0], shown) if shown.any and len(ends) == 1 else None,
            "kv_transfer_params": None,
            "ec_transfer_params": None,
            "output_mode": self.mode,
            "choices": choices,
        }

    def _choice(self, index: int, piece: Piece) -> dict[str, Any]:
        ended, mode = piece.ended, self.mode
        choice: dict[str, Any] = {
            "index": index,
            "finish_reason": None if ended is None else ended.reason,
            "stop_reason": None if ended is None else ended.stop_reason,
            "token_ids": piece.token_ids,
            "routed_experts": None,
            "sampling_mask": None,
            "weight_versions": None if ended is None else version_field(ended)["weight_versions"],
            "logprobs": None,
        }
        num_top = self._asked.sampling_params.num_logprobs
        if num_top is not None and mode == "tokens":
            choice["logprobs"] = token_scores(piece.logprobs)
        elif num_top is not None:
            choice["logprobs"] = self._writer.chat(piece.logprobs, num_top)
        if ended is not None:
            choice |= expert_field(self.turn, ended)
        return choice if mode == "tokens" else {**choice, "text": piece.text}

    def chunk(self, index: int, piece: Piece) -> bytes:
        """Returns a chunk, or b"" if there is nothing to send: the caller sends errors."""
        if piece.ended is not None and piece.ended.error is not None:
            return b""
        if not (piece.token_ids or piece.text or piece.ended is not None):
            return b""
        continuous = wants_continuous_usage(self._asked.stream_options) and piece.usage is not None
        return self._event(
            [self._choice(index, piece)], usage_object(piece.usage) if continuous and piece.usage else None
        )

    def last_chunk(self, ends: Sequence[TurnEnded]) -> bytes:
        """Returns the chunk of the total usage if it was requested, else b""."""
        if not wants_usage(self._asked.stream_options):
            return b""
        return self._event([], usage_object(of_choices([ended.usage for ended in ends])))

    def _event(self, choices: list[dict[str, Any]], usage: dict[str, Any] | None) -> bytes:
        """The first chunk contains the prompt's token ids if they were requested."""
        chunk: dict[str, Any] = {
            "request_id": self.id,
            "usage": usage,
            "output_mode": self.mode,
            "choices": choices,
        }
        if self._prompt_token_ids is not None:
            chunk["prompt_token_ids"], self._prompt_token_ids = self._prompt_token_ids, None
        return event(chunk)
