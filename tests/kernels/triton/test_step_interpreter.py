"""``step_twins.py`` and its like through Triton's interpreter. ``test_interpreter.py`` runs some cases."""

from __future__ import annotations

import importlib.util

import pytest

from tests.kernels.triton.test_interpreter import SECONDS, STEP_TWINS, interpret

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


@pytest.mark.slow
@pytest.mark.timeout(SECONDS)
def test_the_kernels_around_the_model_equal_their_twins() -> None:
    interpret(*STEP_TWINS)
