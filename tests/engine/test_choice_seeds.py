"""The seeds of a request's choices."""

from __future__ import annotations

from chorale.client.continuation import continued
from chorale.engine.types import GenerateRequest, SamplingSpec, choice_seed


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
