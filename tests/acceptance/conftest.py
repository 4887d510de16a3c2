"""One engine for the acceptance tests that need one: it takes a second to start, and all share its rows."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.local_client import LocalClient


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random one."""
    from tests.support.grammar.structured import write_checkpoint

    return write_checkpoint(tmp_path_factory.mktemp("acceptance") / "random")


@pytest.fixture(scope="session")
def client(checkpoint: Path) -> Iterator[LocalClient]:
    from tests.support.grammar.structured import make_client

    made = make_client(checkpoint)
    yield made
    asyncio.run(made.close())
