"""Slow fixtures shared by all acceptance tests: an engine in this process, and a ``chorale serve``.

``demo_served`` has the demo checkpoint, whose answers make sense; ``checkpoint`` is a small random one, for
properties that hold for any output.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.local_client import LocalClient
from tests.support.served import Served, serving


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the folder of a small random checkpoint."""
    from tests.support.grammar.structured import write_checkpoint

    return write_checkpoint(tmp_path_factory.mktemp("acceptance") / "random")


@pytest.fixture(scope="session")
def client(checkpoint: Path) -> Iterator[LocalClient]:
    from tests.support.grammar.structured import make_client

    made = make_client(checkpoint)
    yield made
    asyncio.run(made.close())


@pytest.fixture(scope="package")  # ends when the worker leaves these tests: an idle server takes CPU time
def demo_served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Runs ``chorale serve demo`` with drafts and tools; it expands the demo into the user's cache once."""
    drafts = ("--speculative-config", '{"method": "ngram", "num_speculative_tokens": 4}')
    shown = ("--per-request-spec-decode-metrics", "detailed")
    tools = ("--tool-server", "demo", "--browser-tool", "offline", "--log-stats-interval", "0.5")
    with serving("demo", tmp_path_factory.mktemp("demo-server"), *drafts, *shown, *tools) as server:
        yield server
