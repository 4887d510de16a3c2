"""The checkpoint of most tests of ``LLM``: tiny, random, with the full vocabulary; and an ``LLM`` with it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from chorale import LLM
from chorale.measure.bench.checkpoint_writer import write_random_checkpoint
from chorale.model.config_writer import make_config
from tests.llm.test_llm import OPTIONS, SIZES


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_checkpoint(tmp_path_factory.mktemp("llm") / "model", make_config(**SIZES), seed=3)


@pytest.fixture(scope="session")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(str(folder), **OPTIONS) as made:
        yield made
