"""``lora_request`` of ``LLM``: one for all prompts or one for each, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from chorale import LLM, LoRARequest, SamplingParams
from chorale.model.config_writer import make_config
from tests.llm.test_llm import OPTIONS, SIZES
from tests.support.device.lora import write_adapter

GREEDY = SamplingParams(temperature=0, max_tokens=6)
PROMPT = list(range(1000, 1030))
CONFIG = make_config(**SIZES)


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("adapters")
    for seed in (1, 2):
        write_adapter(root / f"a{seed}", CONFIG, "attention", seed)
    return root


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(str(folder), **OPTIONS, enable_lora=True, max_loras=2) as made:
        yield made


def logprob(llm: LLM, lora: LoRARequest | None) -> float:
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    (output,) = llm.generate(prompt_token_ids=PROMPT, sampling_params=params, lora_request=lora)
    assert output.prompt_logprobs is not None
    return float(next(iter((output.prompt_logprobs[9] or {}).values())).logprob)


def test_each_prompt_may_have_its_adapter(llm: LLM, adapters: Path) -> None:
    loras = [None, *(LoRARequest(f"a{n}", n, str(adapters / f"a{n}")) for n in (1, 2))]
    alone = [
        llm.generate(prompt_token_ids=PROMPT, sampling_params=GREEDY, lora_request=each)[0] for each in loras
    ]
    several = llm.generate(prompt_token_ids=[PROMPT] * 3, sampling_params=GREEDY, lora_request=loras)
    assert [each.outputs[0].token_ids for each in several] == [each.outputs[0].token_ids for each in alone]
    assert len({logprob(llm, each) for each in loras}) == 3
    chat = llm.chat([{"role": "user", "content": "Hi"}], GREEDY, lora_request=loras[1])
    assert chat[0].outputs[0].finish_reason == "length"


def test_load_inplace_reads_the_folder_again(llm: LLM, tmp_path: Path) -> None:
    write_adapter(tmp_path, CONFIG, "attention", 5)
    before = logprob(llm, LoRARequest("x", 9, str(tmp_path)))
    write_adapter(tmp_path, CONFIG, "attention", 6)
    assert logprob(llm, LoRARequest("x", 9, str(tmp_path))) == before
    after = logprob(llm, LoRARequest("x", 9, str(tmp_path), load_inplace=True))
    assert after != before
    assert logprob(llm, LoRARequest("x", 9, str(tmp_path))) == after


def test_wrong_requests(llm: LLM, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="LoRARequest"):
        llm.generate("Hi", GREEDY, lora_request=[object()])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="lora_request"):
        llm.generate(["Hi", "Ho"], GREEDY, lora_request=[None])
    with pytest.raises(ValueError, match="lora_int_id"):
        LoRARequest("x", 0, "/x")
    (failed,) = llm.generate("Hi", GREEDY, lora_request=LoRARequest("x", 3, str(tmp_path / "none")))
    assert failed.outputs[0].finish_reason == "error"
