"""Fixtures of the model tests. Two threads at most: the machine may be shared."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from model_helpers import MakeModel, load_model

from chorale.model.checkpoint_writer import write_random_checkpoint
from chorale.model.config import ModelConfig
from chorale.model.gpt_oss import GptOss
from chorale.model.layouts import Layout

torch.set_num_threads(min(2, torch.get_num_threads()))


@pytest.fixture
def make_model(tmp_path: Path) -> MakeModel:
    """Write a random checkpoint of a configuration and load it in float32."""

    def make(config: ModelConfig, layout: Layout = "published", seed: int = 1) -> GptOss:
        folder = tmp_path / f"{layout}-{seed}"
        return load_model(write_random_checkpoint(folder, config, layout=layout, seed=seed))

    return make
