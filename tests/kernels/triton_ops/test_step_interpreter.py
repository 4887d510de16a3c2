"""``step_twins.py`` through Triton's interpreter, in a process of its own."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from test_interpreter import run

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


def test_the_kernels_around_the_model_equal_their_twins() -> None:
    twins = [str(Path(__file__).parent / name) for name in ("step_twins.py", "filter_twins.py")]
    run(["-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *twins], TRITON_INTERPRET="1")
