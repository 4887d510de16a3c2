"""For every test: torch on one thread. Two on a busy two-core machine wait for each other at each product."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest


@pytest.fixture(scope="session", autouse=True)
def one_torch_thread() -> None:
    import sys

    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
