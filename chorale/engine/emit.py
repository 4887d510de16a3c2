"""Construction of TokenChunks from a sequence and its new token."""

from __future__ import annotations

from chorale.engine.sequence import Sequence
from chorale.engine.types import ChunkTimings, FinishReason, TokenChunk, TokenLogprobs


def first_fields(sequence: Sequence, chunk: TokenChunk) -> None:
    """Set the fields that only the first chunk of a choice has."""
    request = sequence.request
    chunk.timings = chunk.timings or timings(sequence, 0.0)
    chunk.num_cached_tokens = request.num_cached_tokens
    if sequence.sampling.prompt_logprobs is not None:
        chunk.prompt_logprobs = request.prompt_logprobs


def timings(sequence: Sequence, last_token: float) -> ChunkTimings:
    return ChunkTimings(
        sequence.request.arrival,
        sequence.first_scheduled,
        sequence.first_token,
        last_token,
        sequence.num_preemptions,
        bytes(sequence.draft_steps),
    )


def token_chunk(
    sequence: Sequence,
    token_ids: list[int],
    logprobs: list[TokenLogprobs] | None,
    finish: FinishReason | None,
    now: float,
    weight_version: str,
) -> TokenChunk:
    """Return a chunk with tokens, and log-probabilities and the finish reason if there are any; with the
    label of the weights if it is not that of the sequence's last token."""
    chunk = TokenChunk(sequence.request_id, sequence.index, token_ids, finish, logprobs=logprobs)
    if token_ids and sequence.weight_version != weight_version:
        chunk.weight_version = sequence.weight_version = weight_version
    if finish == "stop":
        chunk.stop_token_id = token_ids[-1]
    if finish is not None:
        chunk.timings = timings(sequence, now)
    return chunk


def end_chunk(sequence: Sequence, finish: FinishReason, now: float, error: str | None = None) -> TokenChunk:
    """Return the last chunk of a sequence that ends without a new token."""
    return TokenChunk(
        sequence.request_id, sequence.index, [], finish, timings=timings(sequence, now), error=error
    )
