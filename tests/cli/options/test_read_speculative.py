"""The operator's JSON becomes a SpeculativeConfig, or an error with a correction."""

from __future__ import annotations

from typing import Any

import pytest

from chorale.config.read_speculative import read_speculative
from chorale.config.speculative import SpeculativeConfig, check_ranks_of_head
from chorale.engine.types import EngineLimits
from chorale.errors import ConfigError

FLAG = "--speculative-config"
NGRAM = {"method": "ngram", "num_speculative_tokens": 4}
HEAD = {"method": "eagle3", "model": "nvidia/gpt-oss-120b-Eagle3-v3", "num_speculative_tokens": 3}


def read(**given: Any) -> SpeculativeConfig:
    config, notices = read_speculative(given, FLAG)
    assert notices == ()
    return config


def test_published_configs_are_read() -> None:
    head = read(**HEAD)
    assert (head.method, head.model, head.num_speculative_tokens) == ("eagle3", HEAD["model"], 3)
    assert read(model="nvidia/gpt-oss-120b-Eagle3-v3").method == "eagle3"  # derived from the name
    assert read(model="RedHatAI/gpt-oss-20b-speculator.eagle3").num_speculative_tokens == 3
    assert read(method="eagle", model="x/y").method == "eagle3"
    assert read(model="z-lab/gpt-oss-20b-DFlash").method == "dflash"
    parallel = read(model="amazon/GPT-OSS-20B-P-EAGLE", num_speculative_tokens=8, parallel_drafting=True)
    assert (parallel.method, parallel.parallel_drafting) == ("eagle3", True)
    ngram = read(**NGRAM)
    assert (ngram.prompt_lookup_min, ngram.prompt_lookup_max) == (5, 5)  # vLLM's defaults
    only_most = read(**NGRAM, prompt_lookup_max=3)
    assert (only_most.prompt_lookup_min, only_most.prompt_lookup_max) == (3, 3)
    both = read(**NGRAM, prompt_lookup_max=4, prompt_lookup_min=2)
    assert (both.prompt_lookup_min, both.prompt_lookup_max) == (2, 4)
    old = read(model="[ngram]", num_speculative_tokens=5)
    assert (old.method, old.model) == ("ngram", None)
    suffix = read(method="suffix")
    assert (suffix.num_speculative_tokens, suffix.suffix_decoding_max_tree_depth) == (16, 24)


def test_draft_tokens_can_depend_on_the_batch_size() -> None:
    config = read(
        **HEAD,
        num_speculative_tokens_per_batch_size=[[17, 32, 1], [1, 16, 3], [33, 4096, 0]],
        disable_by_batch_size=64,
    )
    assert config.num_speculative_tokens_per_batch_size == ((1, 16, 3), (17, 32, 1), (33, 4096, 0))
    assert "3 at 1-16 rows" in str(config)
    assert "none from 64 rows on" in str(config)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {1: 4, 64: 4, 65: 0, 1024: 0}),
        ({"num_speculative_tokens": 7}, {64: 7, 65: 0}),
        ({"disable_by_batch_size": 2}, {1: 4, 2: 0, 9: 0}),
        ({"disable_by_batch_size": 100}, {99: 4, 100: 0}),
        (
            {
                "num_speculative_tokens_per_batch_size": [[9, 16, 1], [1, 4, 9], [33, 64, 0]],
                "disable_by_batch_size": 48,
            },
            # Between two ranges, the first one applies.
            {1: 4, 4: 4, 7: 4, 9: 1, 20: 1, 33: 0, 48: 0, 64: 0},
        ),
        ({"num_speculative_tokens_per_batch_size": [[1, 8, 2]]}, {8: 2, 9: 2, 1024: 2}),  # as in vLLM
        ({"num_speculative_tokens_per_batch_size": [[1, 8, 2]], "disable_by_batch_size": 1}, {1: 0, 9: 0}),
    ],
)
def test_draft_tokens_depend_on_the_rows(given: dict[str, Any], expected: dict[int, int]) -> None:
    limits = EngineLimits(8, 16, 1024, 2048, 128, draft_tokens=read(**(NGRAM | given)).tokens_by_rows)
    assert {rows: limits.drafts_at(rows) for rows in expected} == expected


def test_synthetic_acceptance_is_labelled() -> None:
    config = read(method="synthetic", num_speculative_tokens=3, acceptance=[0.8, 0.55, 0.35])
    assert config.acceptance == (0.8, 0.55, 0.35)
    assert "the output has no meaning" in str(config)
    assert not read(**NGRAM).is_synthetic
    one_rate = read(method="synthetic", num_speculative_tokens=2, acceptance=0.5)
    assert one_rate.acceptance == (0.5, 0.25)
    # vLLM's names, with the cost of a head
    whole = {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": 2.68}
    assert read(**HEAD, **whole).acceptance == pytest.approx((1.0, 0.68, 0.0))
    assert read(method="dflash", num_speculative_tokens=3, **whole).model is None  # a random head
    rates = read(**HEAD, rejection_sample_method="synthetic", synthetic_acceptance_rates=[0.7, 0.5, 0.2])
    assert (rates.method, rates.acceptance) == ("eagle3", (0.7, 0.5, 0.2))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("ngram", "JSON object"),
        ({}, "method is missing"),
        ({"method": "ngrm"}, "did you mean ngram"),
        ({**NGRAM, "num_speculative_token": 3}, "did you mean num_speculative_tokens"),
        ({**NGRAM, "num_speculative_tokens": 17}, "num_speculative_tokens: Expected `int` <= 16"),
        ({**NGRAM, "num_speculative_tokens": 0}, "num_speculative_tokens: Expected `int` >= 1"),
        ({**NGRAM, "num_speculative_tokens": 2.5}, "Expected `int`, got `float`"),
        ({**NGRAM, "num_speculative_tokens": True}, "Expected `int`, got `bool`"),
        ({**NGRAM, "prompt_lookup_min": 4, "prompt_lookup_max": 2}, "is more than"),
        ({**NGRAM, "prompt_lookup_max": 0}, "prompt_lookup_max"),
        ({**NGRAM, "model": "nvidia/gpt-oss-120b-Eagle3-v3"}, "has no model"),
        ({"method": "eagle3"}, "needs model"),
        ({"method": "medusa"}, "EAGLE3 or DFlash head"),
        ({"method": "deepseek_mtp"}, "no multi-token prediction layers"),
        ({"method": "draft_model", "model": "openai/gpt-oss-20b"}, "second model"),
        ({"method": "dflash"}, "needs model"),
        ({"method": "dspark", "model": "x/y"}, "block diffusion"),
        ({**NGRAM, "parallel_drafting": True}, "needs a head"),
        ({**HEAD, "parallel_drafting": "maybe"}, "parallel_drafting: Expected `bool"),
        ({"method": "dflash", "model": "x/y", "num_speculative_tokens": 17}, "Expected `int` <= 16"),
        ({**HEAD, "tensor_parallel_size": 2}, "draft_tensor_parallel_size"),
        ({**HEAD, "model": 7}, "model must be a string"),
        ({**NGRAM, "num_speculative_tokens_per_batch_size": [[1, 8, 2], [8, 9, 1]]}, "overlap"),
        ({**NGRAM, "num_speculative_tokens_per_batch_size": [[1, 8, -1]]}, "Expected `int` >= 0"),
        ({**NGRAM, "num_speculative_tokens_per_batch_size": [[2, 8, 3]]}, "start at 1"),
        (
            {**NGRAM, "num_speculative_tokens_per_batch_size": [[1, 8, 1, 9, 3]]},
            "Expected `array` of length 3, got 5",
        ),
        ({**NGRAM, "num_speculative_tokens_per_batch_size": [[8, 1, 2]]}, "not a range"),
        ({**NGRAM, "num_speculative_tokens_per_batch_size": 3}, "Expected `array`"),
        ({**NGRAM, "disable_by_batch_size": 0}, "disable_by_batch_size"),
        ({**NGRAM, "acceptance": [0.5]}, "needs method synthetic"),
        ({"method": "synthetic", "num_speculative_tokens": 2}, "exactly one of"),
        ({"method": "synthetic", "num_speculative_tokens": 2, "acceptance": [0.5]}, "1 rates"),
        ({"method": "synthetic", "acceptance": [0.5, 0.6]}, "must not rise"),
        ({"method": "synthetic", "acceptance": [1.5]}, "Expected `float` <= 1"),
        ({"method": "synthetic", "num_speculative_tokens": 2, "synthetic_acceptance_length": 4}, "1 to 3"),
        ({**NGRAM, "rejection_sample_method": "lossy"}, "not one of"),
        ({"method": "suffix", "suffix_decoding_max_spec_factor": float("nan")}, "Expected `float` > 0"),
    ],
)
def test_invalid_configs_are_refused(given: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as error:
        read_speculative(given, FLAG)
    assert error.value.message.startswith(f"{FLAG}: ")


def test_keys_without_effect_are_named() -> None:
    given = {**HEAD, "quantization": "fp8", "disable_padded_drafter_batch": True, "parallel_drafting": False}
    _, notices = read_speculative(given, FLAG)
    assert [notice.partition(" ")[0] for notice in notices] == [
        "quantization",
        "disable_padded_drafter_batch",
    ]
    _, notices = read_speculative({"method": "suffix", "suffix_decoding_max_cached_requests": 100}, FLAG)
    assert "65,536" in notices[0]


def test_the_head_is_replicated() -> None:
    config = read(**HEAD, draft_tensor_parallel_size=1)
    check_ranks_of_head(config, 4)
    check_ranks_of_head(read(**HEAD, draft_tensor_parallel_size=4), 4)
    with pytest.raises(ConfigError, match="each rank has the whole head"):
        check_ranks_of_head(read(**HEAD, draft_tensor_parallel_size=2), 4)
