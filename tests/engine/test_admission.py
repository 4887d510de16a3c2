"""What a request becomes in the engine: its bounds hold whatever the server lets pass, and its seeds."""

from __future__ import annotations

import math

import pytest

from chorale.api.limits import LIMITS, SIZES
from chorale.client.continuation import continued
from chorale.config.seeds import choice_seed
from chorale.engine.admission import _RANGES, sampling_fault
from chorale.engine.types import GenerateRequest, SamplingSpec


@pytest.mark.parametrize("name", sorted(set(_RANGES) & set(LIMITS)))
def test_what_the_server_accepts_the_engine_accepts(name: str) -> None:
    limit = LIMITS[name]
    low = math.nextafter(limit.min, math.inf) if limit.exclusive_min else limit.min
    for value in (max(low, 0) if name == "top_k" else low, limit.max):  # top_k -1 becomes 0 on the way
        assert sampling_fault(SamplingSpec(**{name: value}), 201088) is None


def test_the_lowest_and_highest_ids_and_biases_are_accepted() -> None:
    ends = (0, 201087)
    spec = SamplingSpec(
        logit_bias=dict(zip(ends, (LIMITS["logit_bias"].min, LIMITS["logit_bias"].max), strict=True)),
        allowed_token_ids=ends,
        stop_token_ids=ends,
        bad_words=(ends,) * SIZES["bad_words"].max,
    )
    assert sampling_fault(spec, 201088) is None
    assert "201086" in (sampling_fault(spec, 201087) or "")


def test_neighbouring_seeds_share_no_choices() -> None:
    seeds = {choice_seed(seed, index) for seed in range(-100, 100) for index in range(64)}
    assert len(seeds) == 200 * 64
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_the_first_choice_has_the_seed_of_the_request() -> None:
    assert [choice_seed(seed, 0) for seed in (0, 1, 2**62)] == [0, 1, 2**62]


def test_another_engine_continues_a_choice_with_its_seed() -> None:
    asked = GenerateRequest(
        request_id="a", prompt_token_ids=[1, 2], sampling=SamplingSpec(n=3, seed=7, max_tokens=9)
    )
    for index in range(3):
        rest = continued(asked, index, [5], "b", began=True)
        assert rest is not None
        assert choice_seed(rest.request.sampling.seed or 0, 0) == choice_seed(7, index)
