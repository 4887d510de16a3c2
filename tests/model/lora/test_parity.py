"""A model with an adapter computes what the merged model computes, for each format of each trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from chorale.kernels import select_ops
from chorale.kernels.cpu.library import library
from chorale.measure.bench.checkpoint_writer import write_random_checkpoint
from chorale.model.config_writer import make_config
from chorale.model.gpt_oss import GptOss
from chorale.model.lora.read import read_adapter
from chorale.model.weights import Target, load_weights
from tests.model.test_parity import transformers_model
from tests.support.device.lora import FORMATS, Draft, write_adapter
from tests.support.device.model import SMALL, largest_difference, prompt
from tests.support.device.paged import PagedRunner, Sequence

CONFIG = make_config(**{**SMALL, "layers": 2})
TOKENS = prompt(150)
# Float32 rounding of other sums; the base model differs from transformers by up to 2e-5 here.
BOUND = 1e-4


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, GptOss]:
    folder = write_random_checkpoint(tmp_path_factory.mktemp("base"), CONFIG, seed=1)
    names = ["reference"] if library().functions is None else ["reference", "cpu"]
    found = {}
    for name in names:
        ops = select_ops(name, "cpu")
        weights = load_weights(folder, Target(CONFIG, ops, torch.float32))
        found[name] = GptOss(CONFIG, weights, ops, 256)
    return found


@torch.inference_mode()
def merged_logits(draft: Draft) -> torch.Tensor:
    model: Any = transformers_model(CONFIG)
    state = model.state_dict()
    for name, delta in draft.deltas.items():
        state[name] += delta
    for name, tensor in draft.replaced.items():
        state[name].copy_(tensor)
    logits: torch.Tensor = model(torch.tensor([TOKENS])).logits[0]
    return logits


@pytest.mark.parametrize("form", FORMATS)
def test_an_adapter_equals_the_merged_model(models: dict[str, GptOss], tmp_path: Path, form: str) -> None:
    draft = write_adapter(tmp_path, CONFIG, form)
    expected = merged_logits(draft)
    adapter = read_adapter(tmp_path, CONFIG).map(torch.Tensor.float)
    base = PagedRunner(models["reference"]).run(TOKENS)
    assert largest_difference(base, expected) > 0.05, "the adapter changes too little to show a fault"
    for name, model in models.items():
        found = PagedRunner(model).run(TOKENS, chunk=64, adapter=adapter)
        assert largest_difference(found, expected) < BOUND, name


def test_rows_of_several_adapters_and_of_the_base(models: dict[str, GptOss], tmp_path: Path) -> None:
    """A step may mix them; rows of the base keep every bit."""
    adapters = []
    for seed, form in enumerate(("attention", "tinker", "router")):
        write_adapter(tmp_path / form, CONFIG, form, seed)
        adapters.append(read_adapter(tmp_path / form, CONFIG).map(torch.Tensor.float))
    rows = [None, adapters[0], adapters[1], None, adapters[0], adapters[2]]
    for name, model in models.items():
        runner = PagedRunner(model)
        work = [Sequence(prompt(20, seed), adapter=adapter) for seed, adapter in enumerate(rows)]
        mixed = runner.step([(each, 20) for each in work])
        plain = runner.step([(Sequence(each.tokens), 20) for each in work])
        for sequence, found, base in zip(work, mixed, plain, strict=True):
            alone = PagedRunner(model).run(sequence.tokens, adapter=sequence.adapter)
            assert largest_difference(found, alone) < BOUND, name
            assert torch.equal(found, base) is (sequence.adapter is None), name
