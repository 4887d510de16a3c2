"""One thread: the machine may be shared, and the tensors are small."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.runtime import write_checkpoint

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random gpt-oss of 4 layers, window 32, vocabulary 512."""
    return write_checkpoint(tmp_path_factory.mktemp("model") / "random")
