"""A real ``chorale serve`` as a person runs it, and the OpenAI SDK.

``demo_served`` has the demo checkpoint, whose answers make sense; ``checkpoint`` is a tiny random one, for
whatever holds for noise too.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from chorale.model.config_writer import make_config
from chorale.testing.checkpoint_writer import write_random_checkpoint
from tests.support.served import Served, serving


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers, the whole vocabulary: a few milliseconds a token."""
    folder = tmp_path_factory.mktemp("checkpoint")
    config = make_config(layers=2, experts=4, hidden=64, inter=64, heads=4, kv_heads=2, head_dim=32)
    return write_random_checkpoint(folder / "tiny", config, seed=5)


@pytest.fixture(scope="session")
def demo_served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """``chorale serve`` without a model; the demo is expanded into the user's cache, once."""
    with serving("demo", tmp_path_factory.mktemp("demo-server")) as server:
        yield server
