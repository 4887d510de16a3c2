"""Fixtures of the model tests.

One thread: these shapes gain nothing from two, and on a busy machine every parallel section of two threads
waits for the scheduler (16 ms a matrix product instead of 0.1).
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from chorale.measure.bench.checkpoint_writer import write_random_checkpoint
from chorale.model.config import ModelConfig
from chorale.model.gpt_oss import GptOss
from chorale.model.layouts import Layout
from tests.support.device.model import MakeModel, load_model

torch.set_num_threads(1)


@pytest.fixture
def make_model(tmp_path: Path) -> MakeModel:
    """Write a random checkpoint of a configuration and load it in float32."""

    def make(config: ModelConfig, layout: Layout = "published", seed: int = 1) -> GptOss:
        folder = tmp_path / f"{layout}-{seed}"
        return load_model(write_random_checkpoint(folder, config, layout=layout, seed=seed))

    return make
