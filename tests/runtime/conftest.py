"""One checkpoint, and what engines give on it when nothing else runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.runtime import each_alone, make_engine, mixed_requests, write_checkpoint


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random gpt-oss of 4 layers, window 32, vocabulary 512."""
    return write_checkpoint(tmp_path_factory.mktemp("model") / "random")


@pytest.fixture(scope="session")
def alone(checkpoint: Path) -> dict[str, list[list[int]]]:
    """What each of ``mixed_requests`` gives when nothing else runs and its prompt is computed at once."""
    return each_alone(make_engine(checkpoint, enable_prefix_caching=False), mixed_requests())
