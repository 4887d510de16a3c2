"""The checkpoint of most tests of ``LLM``: tiny, random, with the full vocabulary."""

from __future__ import annotations

from pathlib import Path

import pytest

from chorale.measure.bench.checkpoint_writer import write_random_checkpoint
from chorale.model.config_writer import make_config
from tests.llm.test_llm import SIZES


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_checkpoint(tmp_path_factory.mktemp("llm") / "model", make_config(**SIZES), seed=3)
