"""The engine's bounds of a SamplingSpec hold whatever the server's table lets pass."""

from __future__ import annotations

import math

import pytest

from chorale.api.limits import LIMITS, SIZES
from chorale.engine.bounds import _RANGES, sampling_fault
from chorale.engine.types import SamplingSpec


@pytest.mark.parametrize("name", sorted(set(_RANGES) & set(LIMITS)))
def test_what_the_server_accepts_the_engine_accepts(name: str) -> None:
    limit = LIMITS[name]
    low = math.nextafter(limit.min, math.inf) if limit.exclusive_min else limit.min
    for value in (max(low, 0) if name == "top_k" else low, limit.max):  # top_k -1 becomes 0 on the way
        assert sampling_fault(SamplingSpec(**{name: value}), 201088) is None


def test_ids_and_biases_at_their_ends() -> None:
    ends = (0, 201087)
    spec = SamplingSpec(
        logit_bias=dict(zip(ends, (LIMITS["logit_bias"].min, LIMITS["logit_bias"].max), strict=True)),
        allowed_token_ids=ends,
        stop_token_ids=ends,
        bad_words=(ends,) * SIZES["bad_words"].max,
    )
    assert sampling_fault(spec, 201088) is None
    assert "201086" in (sampling_fault(spec, 201087) or "")
