"""A conversation with the demo model is continued from KV pages in host memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from chorale import LLM, SamplingParams
from chorale.errors import ConfigError

BLOCK = 16
WORDS = ("the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "while", "it", "rains")


def text(number: int, count: int) -> str:
    return " ".join(WORDS[(number * 7 + index * (number + 1)) % len(WORDS)] for index in range(count))


def talk(llm: LLM, messages: list[dict[str, Any]], seed: int = 1, **fields: Any) -> Any:
    params = SamplingParams(max_tokens=16, seed=seed, temperature=0.0)
    (output,) = llm.chat(messages, params, use_tqdm=False, **fields)  # type: ignore[arg-type]
    return output


def evict_all(llm: LLM) -> None:
    once = SamplingParams(max_tokens=1)
    for number in range(2):
        llm.generate([[1000 + number + index for index in range(380)]], once, use_tqdm=False)


def num_common(one: list[int], other: list[int]) -> int:
    pairs = zip(one, other, strict=False)
    return next(
        (index for index, (left, right) in enumerate(pairs) if left != right), min(len(one), len(other))
    )


@pytest.mark.parametrize("effort", ["high", pytest.param("low", marks=pytest.mark.slow)])
def test_the_next_turn_reuses_the_prefix_that_it_shares_with_the_last(effort: str) -> None:
    """gpt-oss drops earlier reasoning from the prompt. The next turn therefore shares the last *prompt*, and
    the answer only up to the first difference."""
    with LLM(
        "demo", max_model_len=480, num_gpu_blocks_override=45, block_size=BLOCK, kv_offloading_size=0.2
    ) as llm:
        messages = [{"role": "user", "content": text(3, 100)}]
        first = talk(llm, messages, reasoning_effort=effort)
        shared = len(first.prompt_token_ids)
        for turn in range(2):
            evict_all(llm)
            messages += [
                {"role": "assistant", "content": first.outputs[0].text or "Yes."},
                {"role": "user", "content": text(turn, 12)},
            ]
            again = talk(llm, messages, reasoning_effort=effort)
            whole = first.prompt_token_ids + first.outputs[0].token_ids
            assert num_common(whole, again.prompt_token_ids) >= shared
            assert again.num_cached_tokens >= shared // BLOCK * BLOCK
            assert again.num_cached_tokens <= num_common(whole, again.prompt_token_ids)
            first, shared = again, len(again.prompt_token_ids)
        stats = llm._engine.stats
        assert stats.num_host_loads >= 2
        assert stats.prefix_cache_hits + stats.host_cache_hits == stats.cached_prompt_tokens


def test_arguments_of_vllm_set_the_host_memory(folder: Path) -> None:
    with LLM(str(folder), max_model_len=256, swap_space=0.05, kv_offloading_backend="native") as llm:
        assert llm.info.num_host_pages > 0
        assert llm.info.host_kv_bytes <= 0.05 * 2**30
    with pytest.raises(ConfigError, match="the only backend is native"):
        LLM("demo", kv_offloading_backend="lmcache")
    with pytest.raises(ConfigError, match="kv_offloading_size must be at least 0"):
        LLM("demo", kv_offloading_size=-1.0)
