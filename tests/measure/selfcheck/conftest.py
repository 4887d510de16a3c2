from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module")
def process() -> Iterator[subprocess.Popen[bytes]]:
    """A live process that stands for the one of a server (see ``tests.support.selfcheck_server``)."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as running:
        yield running
        running.communicate(b"\n")
