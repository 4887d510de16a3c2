"""LoRA adapters on the Triton kernels of a GPU. ``pytest -m gpu``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from chorale.engine.core import EngineCore
from chorale.engine.types import AdapterRef
from chorale.measure.bench.checkpoint_writer import write_random_checkpoint
from chorale.model.config import ModelConfig
from chorale.model.config_writer import make_config
from tests.gpu.scores import FLOAT32_BOUND, check_rounding
from tests.support.device.lora import write_adapter
from tests.support.runtime import SIZES, Answer, make_engine, random_prompt, request, run

pytestmark = pytest.mark.gpu
FORMS = ("attention", "bias", "router", "parameters", "unsloth", "tinker", "head")
LENGTHS = (1, 5, 12, 33, 130, 300)  # of prompts: every form of the kernels


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("lora")
    config: ModelConfig = make_config(**{**SIZES, "inter": 128})  # streamed products need multiples of 64
    write_random_checkpoint(root / "model", config, seed=1)
    for seed, form in enumerate(FORMS):
        write_adapter(root / form, config, form, seed)
    return root


def engine(folder: Path, **options: Any) -> EngineCore:
    settings = {"enable_lora": True, "max_loras": 3, "max_cpu_loras": 8, "enable_prefix_caching": False}
    return make_engine(folder / "model", **{**settings, "max_num_seqs": 16, **options})


def answers(core: EngineCore, folder: Path, forms: list[str], length: int = 20) -> list[Answer]:
    asked = []
    for number, form in enumerate(forms):
        prompt = random_prompt(length, seed=number)
        each = request(f"r{number}", prompt, temperature=0.0, max_tokens=8, prompt_logprobs=0, logprobs=0)
        if form:
            adapter = AdapterRef(1 + FORMS.index(form), form, str(folder / form))
            each = msgspec.structs.replace(each, adapter=adapter)
        asked.append(each)
    return [choices[0] for choices in run(core, asked).values()]


def scores(found: list[Answer]) -> list[float]:
    return [entry.logprob for answer in found for entry in answer.prompt_logprobs or [] if entry is not None]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_adapters_give_the_scores_of_the_reference(folder: Path, dtype: str) -> None:
    reference = engine(folder, ops="reference", device="cpu")
    kernels = engine(folder, ops="triton", device="cuda", dtype=dtype)
    for length in LENGTHS:
        forms = ["", *FORMS]
        expected, found = (answers(core, folder, forms, length) for core in (reference, kernels))
        differences = [abs(a - b) for a, b in zip(scores(expected), scores(found), strict=True)]
        if dtype == "float32":
            assert max(differences, default=0.0) < FLOAT32_BOUND
            assert [each.token_ids for each in found] == [each.token_ids for each in expected]
        elif length > 100:
            check_rounding(differences, times=2)


@pytest.mark.parametrize("rows", [2, 6, 12, 16])
def test_rows_of_the_base_keep_their_bits_beside_adapters(folder: Path, rows: int) -> None:
    core = engine(folder, ops="triton", device="cuda", dtype="bfloat16")
    forms = (["", "tinker", "", "attention", "parameters", ""] + [""] * rows)[:rows]
    answers(core, folder, forms)  # places the adapters, so that no request waits below
    plain, mixed = answers(core, folder, [""] * rows), answers(core, folder, forms)
    for form, with_others, before in zip(forms, mixed, plain, strict=True):
        if not form:
            assert with_others.token_ids == before.token_ids
            assert scores([with_others]) == scores([before])


def test_company_does_not_change_the_bits_of_an_adapter(folder: Path) -> None:
    core = engine(folder, ops="triton", device="cuda", dtype="bfloat16", batch_invariant=True)
    alone = answers(core, folder, ["tinker"])[0]
    beside = answers(core, folder, ["tinker", "", "parameters", *[""] * 12, "tinker"])[0]
    assert beside.token_ids == alone.token_ids
    assert scores([beside]) == scores([alone])
    assert [each.logprob for each in beside.logprobs] == [each.logprob for each in alone.logprobs]
