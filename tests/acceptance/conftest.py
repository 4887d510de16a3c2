"""One engine for the acceptance tests that need one."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from tests.support.local_client import LocalClient


@pytest.fixture(scope="session")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalClient]:
    """A real engine over a small random checkpoint."""
    from tests.support.structured import make_client, write_checkpoint

    made = make_client(write_checkpoint(tmp_path_factory.mktemp("acceptance") / "random"))
    yield made
    asyncio.run(made.close())
