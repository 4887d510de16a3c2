"""From GenerateRequest to sequences: validation, seeds, limits. Client input never raises.

Clients check requests too, but the engine does not rely on it: an id outside the vocabulary or a NaN would
cause a fault on the device, which ends every request.
"""

from __future__ import annotations

import random
import secrets
from collections.abc import Iterable
from itertools import count

import numpy as np

from chorale.config.sampling_fields import MAX_LOGPROB_TOKEN_IDS, SAMPLING_FIELDS
from chorale.config.seeds import SEED_BITS, choice_seed
from chorale.engine.kv_cache.hashing import root_hash, salted_root
from chorale.engine.sequence import RequestState, Sequence
from chorale.engine.types import EngineLimits, GenerateRequest, SamplingSpec
from chorale.errors import ConfigError

# Added to the priority of batch work, so that under every policy all other requests go first.
BATCH = 2**40
_BIAS = SAMPLING_FIELDS["logit_bias"].engine
_RANGES = {name: field.engine for name, field in SAMPLING_FIELDS.items() if not field.each}


class Admission:
    """Makes the sequences of a request. ``capacity``: tokens of one sequence that fit into the pool."""

    def __init__(self, limits: EngineLimits, capacity: int, prefix_secret: bytes = b"") -> None:
        self._limits = limits
        self._max_len = min(limits.max_model_len, capacity)
        self._capacity = capacity
        self._random = random.Random(limits.seed)
        self.prefix_secret = prefix_secret or secrets.token_bytes(16)
        self._arrivals = count()

    def refusal(self, request: GenerateRequest) -> str | None:
        """Return the reason why the request cannot be served, or None."""
        prompt, limits = request.prompt_token_ids, self._limits
        if not prompt:
            return "the prompt is empty"
        if len(prompt) > limits.max_model_len - 1:
            return (
                f"the prompt has {len(prompt)} tokens; with max_model_len {limits.max_model_len} "
                f"at most {limits.max_model_len - 1} leave room for an answer"
            )
        if len(prompt) + 1 > self._capacity:
            return f"the prompt has {len(prompt)} tokens; the KV cache holds {self._capacity}"
        if min(prompt) < 0 or max(prompt) >= limits.vocab_size:
            return f"the prompt holds a token id outside 0..{limits.vocab_size - 1}"
        start = request.sampling.routed_experts_start
        if start is not None and not 0 <= start <= len(prompt):
            return f"routed_experts_start must be from 0 to {len(prompt)}, the length of the prompt"
        return sampling_fault(request.sampling, limits.vocab_size)

    def accept(self, request: GenerateRequest, now: float) -> RequestState:
        """Make the sequences of a request for which ``refusal`` returned None."""
        state = RequestState(
            request=request,
            prompt=np.array(request.prompt_token_ids, np.int32),
            root=self._root(request),
            arrival=request.arrival_time or now,
        )
        sampling = request.sampling
        base = self._random.getrandbits(SEED_BITS) if sampling.seed is None else sampling.seed
        for index in range(sampling.n):
            state.sequences.append(self._sequence(state, index, choice_seed(base, index)))
        return state

    def _sequence(self, state: RequestState, index: int, seed: int) -> Sequence:
        request, limits = state.request, self._limits
        priority = request.priority if limits.policy == "priority" else 0
        if request.is_batch:
            priority += BATCH
        sampling = request.sampling
        max_len = self._max_len
        if sampling.max_tokens is not None:
            # A step samples at least one token: max_tokens 0 computes the prompt and drops that token.
            max_len = min(max_len, len(state.prompt) + max(1, sampling.max_tokens))
        sequence = Sequence(state, index, key=(priority, next(self._arrivals)), seed=seed, max_len=max_len)
        eos = () if sampling.ignore_eos else limits.eos_token_ids
        sequence.stop_ids = frozenset(eos) | frozenset(sampling.stop_token_ids)
        return sequence

    def _root(self, request: GenerateRequest) -> bytes | None:
        """Returns the root of the request's block hashes, by salt and adapter or by request; None: none."""
        if self._limits.enable_prefix_caching:
            return salted_root(self.prefix_secret, request.cache_salt, request.adapter.id)
        if request.sampling.n > 1:
            return root_hash(self.prefix_secret, f"request:{next(self._arrivals)}")
        return None


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
    if len(sampling.logprob_token_ids) > MAX_LOGPROB_TOKEN_IDS:
        return f"logprob_token_ids must have at most {MAX_LOGPROB_TOKEN_IDS} ids"
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
    yield "logprob_token_ids", sampling.logprob_token_ids
    for word in sampling.bad_words:
        yield "bad_words", word


def check_limits(limits: EngineLimits) -> None:
    """Raises ``ConfigError`` naming the limit that cannot work."""
    least = {
        "num_blocks": 2,  # one block of each group
        "block_size": 1,
        "max_num_seqs": 1,
        "max_num_batched_tokens": 1,
        "max_model_len": 2,
        "sliding_window": 1,
    }
    for name, minimum in least.items():
        value = getattr(limits, name)
        if value < minimum:
            raise ConfigError(f"{name} must be at least {minimum}, not {value}")
