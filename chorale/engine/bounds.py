"""Checks of SamplingSpec. Clients check requests too, but the engine does not rely on it: an id outside the
vocabulary or a NaN would fault on the device, and such a fault ends every request.
"""

from __future__ import annotations

from collections.abc import Iterable

from chorale.config.sampling_fields import SAMPLING_FIELDS
from chorale.engine.types import SamplingSpec

_BIAS = SAMPLING_FIELDS["logit_bias"].engine
_RANGES = {name: field.engine for name, field in SAMPLING_FIELDS.items() if not field.each}


def sampling_fault(sampling: SamplingSpec, vocab_size: int) -> str | None:
    """Return the first reason why the device cannot serve ``sampling``, or None."""
    for name, allowed in _RANGES.items():
        value = getattr(sampling, name)
        if value is not None and not allowed.holds(value):
            return f"{name} must be {allowed}, not {value!r}"
    if sampling.allowed_token_ids is not None and not sampling.allowed_token_ids:
        return "allowed_token_ids is empty: no token could be sampled"
    if not all(map(_BIAS.holds, sampling.logit_bias.values())):
        return f"logit_bias holds a value that is not {_BIAS}"
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
