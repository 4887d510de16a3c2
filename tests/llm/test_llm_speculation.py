"""``LLM(speculative_config=...)``: what is logged, and errors before weights are loaded."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from chorale import LLM, SamplingParams
from chorale.errors import ConfigError

ENGINE: dict[str, Any] = {"device": "cpu", "num_threads": 1, "max_model_len": 1024, "max_num_seqs": 1}


def test_synthetic_acceptance_is_labelled(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It is for measurements: drafts of a random head are accepted as often as the profile says."""
    config = {"method": "synthetic", "acceptance": [0.9, 0.8]}
    with caplog.at_level(logging.WARNING), LLM(folder, **ENGINE, speculative_config=config) as llm:
        llm.generate("one two three", SamplingParams(max_tokens=300, ignore_eos=True, seed=1))
        stats = llm._engine.stats  # type: ignore[union-attr]
        rates = [accepted / stats.num_drafts for accepted in stats.accepted_per_position]
        assert rates == pytest.approx([0.9, 0.8], abs=0.08)
    assert "the output has no meaning" in caplog.text


def test_a_key_without_effect_is_logged_and_a_bad_config_is_an_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = {"method": "ngram", "quantization": "fp8", "draft_tensor_parallel_size": 2}
    with caplog.at_level(logging.WARNING), pytest.raises(ConfigError, match="whole head"):
        LLM("demo", **ENGINE, speculative_config=config)
    assert "quantization" in caplog.text
