"""``LLM(speculative_config=...)``: the same output in fewer steps, and errors before weights are loaded."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from chorale import LLM, SamplingParams
from chorale.errors import ConfigError
from chorale.measure.bench.checkpoint_writer import write_random_checkpoint
from chorale.model.config_writer import make_config

ENGINE: dict[str, Any] = {"device": "cpu", "num_threads": 1, "max_model_len": 1024, "max_num_seqs": 1}
PROMPT = "one two three"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = make_config(layers=2, experts=4, hidden=64, inter=64, heads=4, kv_heads=2, head_dim=32)
    return write_random_checkpoint(tmp_path_factory.mktemp("checkpoint") / "tiny", config, seed=5)


def run(model: Path, **options: Any) -> tuple[list[tuple[int, ...]], int, int]:
    """Return token ids, steps and accepted tokens of four requests; two repeat the previous request."""
    with LLM(model, **ENGINE, **options) as llm:
        params = [
            SamplingParams(max_tokens=40, temperature=heat, seed=2, ignore_eos=True) for heat in (0, 0, 1, 1)
        ]
        outputs = llm.generate([PROMPT] * 4, params, use_tqdm=False)
        stats = llm._engine.stats  # type: ignore[union-attr]
        return (
            [tuple(output.outputs[0].token_ids) for output in outputs],
            stats.num_steps,
            stats.num_accepted_tokens,
        )


def test_drafts_give_the_same_output_in_fewer_steps(checkpoint: Path) -> None:
    expected, steps, _ = run(checkpoint)
    found, fewer, accepted = run(checkpoint, speculative_config={"method": "suffix"})
    assert found == expected
    assert accepted > 40
    assert fewer < steps


def test_synthetic_acceptance_is_labelled(checkpoint: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It is for measurements: drafts of a random head are accepted as often as the profile says."""
    config = {"method": "synthetic", "acceptance": [0.9, 0.8]}
    with caplog.at_level(logging.WARNING):
        _, steps, accepted = run(checkpoint, speculative_config=config)
    assert "the output has no meaning" in caplog.text
    assert accepted > 0
    assert steps > 0


def test_a_key_without_effect_is_logged_and_a_bad_config_is_an_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = {"method": "ngram", "quantization": "fp8", "draft_tensor_parallel_size": 2}
    with caplog.at_level(logging.WARNING), pytest.raises(ConfigError, match="whole head"):
        LLM("demo", **ENGINE, speculative_config=config)
    assert "quantization" in caplog.text
