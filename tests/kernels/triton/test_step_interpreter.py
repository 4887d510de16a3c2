"""``step_twins.py`` through Triton's interpreter, in a process of its own."""

from __future__ import annotations

import importlib.util

import pytest

from tests.kernels.triton.test_interpreter import SECONDS, interpret

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


@pytest.mark.timeout(SECONDS)
def test_the_kernels_around_the_model_equal_their_twins_in_some_cases() -> None:
    interpret("step_twins.py", "filter_twins.py", "draft_twins.py", "page_twins.py", every=48)


@pytest.mark.slow
@pytest.mark.timeout(SECONDS)
def test_the_kernels_around_the_model_equal_their_twins() -> None:
    interpret("step_twins.py", "filter_twins.py", "draft_twins.py", "page_twins.py")
