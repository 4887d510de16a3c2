"""Lets the acceptance tests import the helpers of other folders; one engine for those that need one."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from chorale.client.local import LocalClient

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2] / "structured")]


@pytest.fixture(scope="session")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalClient]:
    """A real engine over a small random checkpoint."""
    from structured_helpers import make_client, write_checkpoint

    made = make_client(write_checkpoint(tmp_path_factory.mktemp("acceptance") / "random"))
    yield made
    asyncio.run(made.close())
