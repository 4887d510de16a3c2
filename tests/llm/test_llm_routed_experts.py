"""``LLM(enable_return_routed_experts=True)``: an array for each output, the same however it was computed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from chorale import LLM, SamplingParams

NAME, PROMPT = "routed_experts_prompt_start", list(range(1000, 1060))
WAYS: list[dict[str, Any]] = [{}, {}, {"n": 3, NAME: 37}, {"logprobs": 2, "prompt_logprobs": 1}]


def generate(llm: LLM, prompt: list[int], **fields: Any) -> Any:
    params = SamplingParams(**{"max_tokens": 10, "seed": 1, "ignore_eos": True, **fields})
    return llm.generate(prompt_token_ids=prompt, sampling_params=params, use_tqdm=False)[0]


@pytest.fixture(scope="module", params=[1, pytest.param(2, marks=pytest.mark.slow)])
def llm(request: pytest.FixtureRequest) -> Iterator[LLM]:
    options: dict[str, Any] = {"num_threads": 1, "max_model_len": 512, "data_parallel_size": request.param}
    with LLM("demo", enable_return_routed_experts=True, enable_sleep_mode=True, **options) as made:
        yield made


def test_outputs_have_the_experts_of_one_prefill(llm: LLM) -> None:
    """Prompt and output as one prompt give the same experts, computed at once and without the cache."""
    outputs = [(generate(llm, PROMPT, **fields), fields.get(NAME, 0)) for fields in WAYS]
    stop = outputs[0][0].outputs[0].text[3:5]
    outputs.append((generate(llm, PROMPT, stop=stop), 0))
    messages = [{"role": "user", "content": "What is 3 + 4?"}]
    outputs.append((llm.chat(messages, SamplingParams(max_tokens=9), use_tqdm=False)[0], 0))
    for output, start in outputs:
        for choice in output.outputs:
            tokens = output.prompt_token_ids + choice.token_ids
            alone = generate(llm, tokens[:-1], max_tokens=1, prompt_logprobs=0)
            assert (alone.num_cached_tokens, choice.routed_experts.dtype) == (0, np.uint8)
            assert choice.routed_experts.shape == (len(tokens) - 1 - start, 6, 4)
            np.testing.assert_array_equal(choice.routed_experts, alone.outputs[0].routed_experts[start:])
    assert outputs[1][0].num_cached_tokens > 0
    assert outputs[4][0].outputs[0].stop_reason == stop
    with pytest.raises(ValueError, match=NAME):
        generate(llm, PROMPT, **{NAME: 61})


def test_experts_after_a_sleep_are_those_before(llm: LLM) -> None:
    before = generate(llm, PROMPT).outputs[0]
    for level in (1, 2):
        llm.sleep(level)
        llm.wake_up()
        found = generate(llm, PROMPT)
        assert found.num_cached_tokens == 0  # the pages, and the experts kept with them, are gone
        np.testing.assert_array_equal(found.outputs[0].routed_experts, before.routed_experts)
