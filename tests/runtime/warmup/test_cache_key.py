"""What an engine tells of itself to find out whether its kernels were compiled before."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from chorale.config.engine import EngineConfig
from chorale.kernels.reference.ops import REFERENCE_OPS
from chorale.model.config import ModelConfig
from chorale.model.draft.config import small_head
from chorale.model.draft.random_head import random_head
from chorale.model.gpt_oss import GptOss
from chorale.model.hub import resolve_model
from chorale.runtime.device import open_device
from chorale.runtime.drafts.drafting import DraftSetup
from chorale.runtime.sizing.resolve import Resolved, resolve
from chorale.runtime.warmup.cache_key import cache_key
from chorale.serve.engine.build_rank import load_model, weight_target
from chorale.serve.engine.compile_phase import DryModel


@pytest.fixture(scope="module")
def loaded() -> tuple[GptOss, Resolved]:
    config = EngineConfig(num_gpu_blocks_override=50, max_model_len=256, max_num_seqs=8, device="cpu")
    folder = Path(resolve_model(config.model))
    device, model_config = open_device("cpu", 1), ModelConfig.load(folder)
    resolved = resolve(config, model_config, device.hardware, can_overlap=False, can_capture=False)
    return load_model(
        folder, weight_target(config, model_config, REFERENCE_OPS, resolved, device), resolved
    ), resolved


def test_equal_starts_have_equal_keys(loaded: tuple[GptOss, Resolved]) -> None:
    model, resolved = loaded
    assert cache_key(model, resolved) == cache_key(model, resolved)
    more_pages = replace(resolved, limits=replace(resolved.limits, num_blocks=51))
    assert cache_key(model, resolved) == cache_key(model, more_pages)


@pytest.mark.parametrize("name", ["max_num_seqs", "max_num_batched_tokens", "block_size", "max_model_len"])
def test_another_limit_changes_the_key(loaded: tuple[GptOss, Resolved], name: str) -> None:
    model, resolved = loaded
    limits = replace(resolved.limits, **{name: getattr(resolved.limits, name) * 2})
    assert cache_key(model, resolved) != cache_key(model, replace(resolved, limits=limits))


@pytest.mark.parametrize("change", [{"dtype": "float16"}, {"kv_dtype": "fp8"}, {"graph_rows": (1, 2)}])
def test_another_type_or_graph_changes_the_key(
    loaded: tuple[GptOss, Resolved], change: dict[str, object]
) -> None:
    model, resolved = loaded
    assert cache_key(model, resolved) != cache_key(model, replace(resolved, **change))


def test_another_memory_layout_of_weights_changes_the_key(loaded: tuple[GptOss, Resolved]) -> None:
    model, resolved = loaded
    before, norm = cache_key(model, resolved), model.weights.final_norm
    twice = torch.cat((norm, norm))
    for other in (norm.double(), twice, twice[::2], twice[1 : len(norm) + 1]):
        weights = replace(model.weights, final_norm=other)
        changed = GptOss(model.config, weights, model.ops, resolved.limits.max_model_len)
        assert cache_key(changed, resolved) != before


def test_another_source_of_drafts_changes_the_facts(loaded: tuple[GptOss, Resolved]) -> None:
    model, resolved = loaded
    config = replace(small_head(model.config), vocab_size=256, draft_vocab_size=256)
    heads = (None, random_head(config, REFERENCE_OPS, max_len=64))
    setups = [None, *(DraftSetup(3, head, REFERENCE_OPS) for head in heads)]
    unused: Any = None
    found = {DryModel(model, resolved, unused, unused, drafts=setup).facts() for setup in setups}
    assert len(found) == len(setups)
