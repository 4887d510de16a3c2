"""Tests marked ``gpu`` are skipped where there is none."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.runtime import write_checkpoint


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random gpt-oss of 4 layers, window 32, vocabulary 512."""
    return write_checkpoint(tmp_path_factory.mktemp("model") / "random")
