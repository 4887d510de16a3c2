"""For every test: torch on one thread. Two on a busy two-core machine wait for each other at each product."""

from __future__ import annotations

import asyncio
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest

from chorale.config import ToolConfig


@pytest.fixture(scope="session", autouse=True)
def one_torch_thread() -> None:
    import sys

    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)


@pytest.fixture(scope="session")
def python_sandbox() -> str:
    """What runs the python tool here, as ``--python-tool auto`` finds it; skips the test if nothing does."""
    from chorale.tools.service import probe_tools

    found = asyncio.run(probe_tools(ToolConfig(python="auto"), os.environ))
    if "python" not in found.available:
        pytest.skip(f"no sandbox for the python tool: {found.missing['python']}")
    return found.available["python"]
