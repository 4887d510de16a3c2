"""The bodies of the derender endpoints, with answers or chunks of /inference/v1/generate in them.

The choices of turns read the tokens of these, as they read those of an engine.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from chorale.api import limits
from chorale.api.field_docs import described
from chorale.api.fields import TokenId
from chorale.api.state import ServerState
from chorale.engine.types import FinishReason, TokenChunk, TokenLogprobs
from chorale.turns.choice.choice import Choice
from chorale.turns.choice.raw_choice import RawChoice
from chorale.turns.events import Fold, OutputEvent
from chorale.turns.needs import Ended
from chorale.turns.request import TurnRequest

_Count = Annotated[int, limits.number("prompt_tokens")]
_Ids = Annotated[list[TokenId], limits.items("prompt_tokens")]


class _Answer(BaseModel):
    """A part of an answer. Its other keys have no effect here."""

    model_config = ConfigDict(extra="ignore", strict=True)


class Score(_Answer):
    token_id: TokenId
    logprob: Annotated[float, limits.number("logprob")]
    rank: Annotated[int, limits.number("rank")] | None = None
    top_logprobs: Annotated[list[Score], limits.items("candidates")] = []


def _entry(score: Score) -> TokenLogprobs:
    """Returns a token and the others, likeliest first."""
    top = sorted(score.top_logprobs, key=lambda each: each.rank or 0)
    ids, logprobs = [each.token_id for each in top], [each.logprob for each in top]
    return TokenLogprobs(score.token_id, score.logprob, score.rank or 1, ids, logprobs)


class Scores(_Answer):
    content: Annotated[list[Score], limits.items("prompt_tokens")] | None = None


class GeneratedChoice(_Answer):
    index: Annotated[int, limits.number("index")]
    finish_reason: Literal["stop", "length"] | None = None
    stop_reason: TokenId | Annotated[str, limits.items("identifier")] | None = None
    token_ids: _Ids = []
    logprobs: Scores | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        scores = self.logprobs.content if self.logprobs is not None else None
        if scores is not None and [each.token_id for each in scores] != self.token_ids:
            raise ValueError("logprobs must have one entry for each token")
        return self


class _Details(_Answer):
    cached_tokens: _Count | None = None


class GeneratedUsage(_Answer):
    prompt_tokens: _Count = 0
    completion_tokens: _Count = 0
    prompt_tokens_details: _Details | None = None


class Generated(_Answer):
    """An answer of /inference/v1/generate with ``output_mode`` "tokens", or a chunk of its stream."""

    request_id: Annotated[str, limits.items("identifier")]
    output_mode: Literal["tokens"] = "tokens"
    choices: Annotated[list[GeneratedChoice], Field(max_length=16)]
    usage: GeneratedUsage | None = None
    prompt_token_ids: _Ids | None = None
    prompt_logprobs: list[dict[str, Any] | None] | None = None

    def prompt(self, ids: list[int] | None, count: int | None) -> list[int]:
        """Returns the prompt, or if only its length is known, as many zeros."""
        known = ids or self.prompt_token_ids or []
        if count is None and not known and self.usage is not None:
            count = self.usage.prompt_tokens
        return known if count is None or len(known) == count else [0] * count

    @property
    def num_cached(self) -> int:
        details = self.usage.prompt_tokens_details if self.usage is not None else None
        return 0 if details is None else details.cached_tokens or 0


class StreamState(_Answer):
    """What the client carries from chunk to chunk: all tokens so far, which are read again for each chunk."""

    output_token_ids: _Ids = []


class _Derender(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, json_schema_extra=described)

    model: str | None = None
    stream: bool = False
    generate_chunk: Generated | None = None
    stream_state: StreamState | None = None


class DerenderChatRequest(_Derender):
    """``generate_response``, or with ``stream`` a ``generate_chunk`` and the state of the one before."""

    chat_request: dict[str, Any]
    generate_response: Generated | None = None
    prompt_tokens: _Count | None = None
    prompt_token_ids: _Ids | None = None


class DerenderCompletionRequest(_Derender):
    """Lists with one element for each prompt; with ``stream``, a chunk and the values of its prompt."""

    completion_request: dict[str, Any] = {}
    generate_responses: Annotated[list[Generated], limits.items("prompts")] | None = None
    prompt_tokens: list[_Count] | _Count | None = None
    prompt_token_ids: list[_Ids | None] | _Ids | None = None


def num_candidates(choices: Iterable[GeneratedChoice], most: int) -> int | None:
    """Returns the largest number of candidates at a position, up to ``most``. None: there are no scores."""
    scores = [each.logprobs.content for each in choices if each.logprobs is not None]
    counts = [len(each.top_logprobs) for content in scores for each in content or ()]
    return min(max(counts), most) if counts else None


def choice_chunk(state: ServerState, choice: GeneratedChoice, num_cached: int = 0) -> TokenChunk:
    """Returns a choice as the engine gives it."""
    scores = choice.logprobs.content if choice.logprobs is not None else None
    logprobs = None if scores is None else [_entry(each) for each in scores]
    return chunk_of(state, choice.token_ids, choice.finish_reason, choice.stop_reason, logprobs, num_cached)


def chunk_of(
    state: ServerState,
    token_ids: list[int],
    finish_reason: FinishReason | None = None,
    stop_reason: str | int | None = None,
    logprobs: list[TokenLogprobs] | None = None,
    num_cached: int = 0,
) -> TokenChunk:
    """Returns tokens of a choice as the engine gives them."""
    chunk = TokenChunk("", 0, token_ids, finish_reason, logprobs=logprobs, num_cached_tokens=num_cached)
    ends = (stop_reason, *state.client.info.eos_token_ids)
    if finish_reason == "stop" and token_ids and token_ids[-1] in ends:
        chunk.stop_token_id = token_ids[-1]
    return chunk


def chat_choice(state: ServerState, turn: TurnRequest) -> Choice:
    eos = frozenset(state.client.info.eos_token_ids)
    return Choice(state.vocab, replace(turn, stream_interval=1), 0, eos)


def play(choice: Choice | RawChoice, chunk: TokenChunk) -> list[OutputEvent]:
    """Returns the events of more tokens. A choice that would need the model again ends."""
    need = choice.feed(chunk)
    if need is not None and not isinstance(need, Ended):
        choice.end("stop")
    return choice.take()


def folded(choice: Choice | RawChoice, chunk: TokenChunk) -> Fold:
    """Returns a choice that has these tokens only."""
    fold = Fold()
    fold.add(play(choice, chunk))
    return fold
