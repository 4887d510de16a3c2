"""Generated tokens in place of an engine, so that the code of other endpoints makes an answer of them.

A long answer takes a while: call these functions in a thread.
"""

from __future__ import annotations

from dataclasses import replace

from chorale.api.completions.request import CompletionRequest
from chorale.api.state import ServerState
from chorale.engine.types import FinishReason, TokenChunk, TokenLogprobs
from chorale.turns.choice.choice import Choice
from chorale.turns.choice.raw_choice import RawChoice
from chorale.turns.events import Fold, OutputEvent
from chorale.turns.needs import Ended
from chorale.turns.request import TurnRequest


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
    if (
        finish_reason == "stop"
        and token_ids
        and token_ids[-1] in (stop_reason, *state.client.info.eos_token_ids)
    ):
        chunk.stop_token_id = token_ids[-1]
    return chunk


def chat_choice(state: ServerState, turn: TurnRequest) -> Choice:
    eos = frozenset(state.client.info.eos_token_ids)
    return Choice(state.vocab, replace(turn, stream_interval=1), 0, eos)


def raw_choice(state: ServerState, turn: TurnRequest, completion: CompletionRequest) -> RawChoice:
    return RawChoice(
        state.vocab,
        replace(turn, stream_interval=1),
        0,
        frozenset(state.client.info.eos_token_ids),
        skip_special_tokens=completion.skip_special_tokens,
        discard=completion.max_tokens == 0,
        scores_stop=completion.return_token_ids,
    )


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
