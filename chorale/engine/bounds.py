"""Checks of SamplingSpec. Clients check requests too, but the engine does not rely on it: an id outside the
vocabulary or a NaN would fault on the device, and such a fault ends every request.
"""

from __future__ import annotations

from collections.abc import Iterable

from chorale.engine.types import MAX_LOGPROBS, SamplingSpec

INT32_MAX = 2**31 - 1
MAX_CHOICES = 16_384  # of one request; the server's own limit is far below
MOST_BIAS = 1e6
SMALLEST = 5e-324  # above 0

# name -> (lowest, highest), both allowed; a NaN is in no range
_RANGES: dict[str, tuple[float, float]] = {
    "n": (1, MAX_CHOICES),
    "temperature": (0.0, 1e6),
    "top_p": (SMALLEST, 1.0),
    "top_k": (0, INT32_MAX),
    "min_p": (0.0, 1.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "repetition_penalty": (SMALLEST, 1e6),
    "min_tokens": (0, INT32_MAX),
    "max_tokens": (0, INT32_MAX),
    "logprobs": (0, MAX_LOGPROBS),
    "prompt_logprobs": (0, MAX_LOGPROBS),
}


def sampling_fault(sampling: SamplingSpec, vocab_size: int) -> str | None:
    """Return the first reason why the device cannot serve ``sampling``, or None."""
    for name, (low, high) in _RANGES.items():
        value = getattr(sampling, name)
        if value is not None and not low <= value <= high:
            return f"{name} must be from {low:g} to {high:g}, not {value!r}"
    if sampling.allowed_token_ids is not None and not sampling.allowed_token_ids:
        return "allowed_token_ids is empty: no token could be sampled"
    if not all(-MOST_BIAS <= value <= MOST_BIAS for value in sampling.logit_bias.values()):
        return f"logit_bias holds a value that is not from {-MOST_BIAS:g} to {MOST_BIAS:g}"
    if not all(sampling.bad_words):
        return "bad_words holds an empty sequence"
    for name, ids in _token_ids(sampling):
        if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
            return f"{name} holds a token id outside 0..{vocab_size - 1}"
    return None


def _token_ids(sampling: SamplingSpec) -> Iterable[tuple[str, Iterable[int]]]:
    yield "logit_bias", sampling.logit_bias
    yield "stop_token_ids", sampling.stop_token_ids
    yield "allowed_token_ids", sampling.allowed_token_ids or ()
    for word in sampling.bad_words:
        yield "bad_words", word
