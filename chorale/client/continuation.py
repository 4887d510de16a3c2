"""Builds the request that continues a choice on another engine after its engine was lost.

Sampling noise is a function of seed, position and token id (``kernels/reference/sampling/noise.py``), so an
engine that gets the prompt and the delivered tokens samples the same next tokens as the lost engine.
Presence and frequency penalties and bad words depend on the whole output. A choice that uses them is computed
again from its start, and its first tokens must equal the delivered ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from chorale.config.seeds import choice_seed
from chorale.engine.types import GenerateRequest, SamplingSpec, TokenChunk


@dataclass(frozen=True, slots=True)
class Continuation:
    """``again``: tokens that the engine will repeat and that must not be delivered twice."""

    request: GenerateRequest
    again: tuple[int, ...] = ()


def continued(
    request: GenerateRequest, index: int, delivered: Sequence[int], request_id: str, *, began: bool
) -> Continuation | None:
    """Returns the request for the rest of choice ``index``, or None if nothing is left to sample.

    The request has a seed. ``began``: a chunk of the choice was delivered, and with it the prompt logprobs,
    which only the first chunk has.
    """
    sampling, done = request.sampling, len(delivered)
    seed = None if sampling.seed is None else choice_seed(sampling.seed, index)
    alone = msgspec.structs.replace(sampling, n=1, seed=seed)
    # Routed experts were delivered of the positions before the last delivered token.
    start = None if sampling.routed_experts_start is None else len(request.prompt_token_ids)
    if began:
        alone = msgspec.structs.replace(alone, prompt_logprobs=None, routed_experts_start=start)
    if not done or _counts_output(sampling):
        return Continuation(
            msgspec.structs.replace(request, request_id=request_id, sampling=alone), tuple(delivered)
        )
    if sampling.max_tokens is not None and sampling.max_tokens <= done:
        return None
    rest = msgspec.structs.replace(
        alone,
        max_tokens=None if sampling.max_tokens is None else sampling.max_tokens - done,
        min_tokens=max(sampling.min_tokens - done, 0),
        grammar_context=sampling.grammar_context + done if sampling.grammar else 0,
        routed_experts_start=None if start is None else start + done - 1,
    )
    prompt = [*request.prompt_token_ids, *delivered]
    return Continuation(
        msgspec.structs.replace(request, request_id=request_id, prompt_token_ids=prompt, sampling=rest)
    )


def _counts_output(sampling: SamplingSpec) -> bool:
    return bool(sampling.presence_penalty or sampling.frequency_penalty or sampling.bad_words)


def without_repeated(chunk: TokenChunk, again: Sequence[int]) -> tuple[TokenChunk, Sequence[int]] | None:
    """Returns the chunk without the tokens that repeat ``again``, and the rest of ``again``.

    Returns None if its tokens differ from ``again``, or if the choice ends before all of ``again``.
    """
    count = min(len(again), len(chunk.token_ids))
    if tuple(chunk.token_ids[:count]) != tuple(again[:count]):
        return None
    left = again[count:]
    if left and chunk.finish_reason not in (None, "abort", "error"):
        return None
    logprobs = chunk.logprobs[count:] if chunk.logprobs is not None else None
    experts = chunk.routed_experts
    if experts is not None and count:  # a chunk with the prompt's experts has one token
        found = b"".join(experts)
        experts = [found[len(found) * count // len(chunk.token_ids) :]]
    kept = msgspec.structs.replace(chunk, token_ids=chunk.token_ids[count:], logprobs=logprobs)
    return msgspec.structs.replace(kept, routed_experts=experts), left
