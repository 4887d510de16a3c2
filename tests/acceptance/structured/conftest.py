"""One engine for the folder: it takes a second to start, and its rows are shared by all tests."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.local_client import LocalClient
from tests.support.structured import make_client, write_checkpoint


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("structured") / "random")


@pytest.fixture(scope="session")
def client(checkpoint: Path) -> Iterator[LocalClient]:
    client = make_client(checkpoint)
    yield client
    asyncio.run(client.close())
