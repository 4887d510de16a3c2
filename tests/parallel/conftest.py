"""The checkpoint of most tests of ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from chorale.measure.bench.checkpoint_writer import write_random_checkpoint
from chorale.model.config_writer import make_config
from tests.parallel.test_shared_model import ODD


@pytest.fixture(scope="session")
def odd(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_checkpoint(tmp_path_factory.mktemp("odd"), make_config(**ODD), seed=3)
