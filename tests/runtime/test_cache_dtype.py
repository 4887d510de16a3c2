"""``--kv-cache-dtype``: vLLM's names, those that are refused with their reason, and fp8 blocks end to end."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from chorale.config.cache_dtype import cache_dtype
from chorale.config.options.settings import merge
from chorale.errors import ConfigError
from tests.support.runtime import make_engine, random_prompt, request, run


def test_fp8_is_e4m3() -> None:
    assert [cache_dtype(name) for name in ("auto", "bfloat16", "float32", "fp8", "fp8_e4m3")] == [
        *("auto", "bfloat16", "float32", "fp8_e4m3", "fp8_e4m3")
    ]


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("fp8_e5m2", "mantissa"),
        ("turboquant_k8v4", "no kernel"),
        ("bf16", "not known"),
    ],
)
def test_other_names_are_refused_with_a_reason(name: str, why: str) -> None:
    with pytest.raises(ConfigError, match=f"--kv-cache-dtype {name}: .*{why}"):
        cache_dtype(name)


def test_the_command_line_refuses_other_names_too() -> None:
    assert merge(["demo", "--kv-cache-dtype", "fp8_e4m3"], {}).engine.kv_cache_dtype == "fp8_e4m3"
    with pytest.raises(ConfigError, match="fp8_e5m2: two bits"):
        merge(["demo", "--kv-cache-dtype", "fp8_e5m2"], {})


def scores(checkpoint: Path, **options: object) -> list[float]:
    each = request("p", random_prompt(150, seed=1), max_tokens=1, prompt_logprobs=0)
    (answer,) = run(make_engine(checkpoint, **options), [each])["p"]
    return [entry.logprob for entry in answer.prompt_logprobs or () if entry]


def test_chunks_see_what_the_whole_prompt_sees(checkpoint: Path) -> None:
    """A key is rounded before it is first read, so it does not matter in which step it was written."""
    whole = scores(checkpoint, kv_cache_dtype="fp8")
    cut = scores(checkpoint, kv_cache_dtype="fp8", max_num_batched_tokens=37)
    assert np.abs(np.array(whole) - np.array(cut)).max() < 5e-3
    exact = scores(checkpoint)
    assert np.median(np.abs(np.array(whole) - np.array(exact))) > 1e-4  # else nothing was rounded


def test_a_prefix_hit_gives_what_a_miss_gives(checkpoint: Path) -> None:
    prompt = random_prompt(150, seed=2)
    core = make_engine(checkpoint, kv_cache_dtype="fp8", enable_prefix_caching=True)
    ((miss,), (hit,)) = (
        run(core, [request(name, prompt, max_tokens=12, temperature=0.0)])[name] for name in "ab"
    )
    assert (miss.num_cached_tokens, hit.num_cached_tokens) == (0, 144)
    assert len(miss.token_ids) == 12
    assert hit.token_ids == miss.token_ids
