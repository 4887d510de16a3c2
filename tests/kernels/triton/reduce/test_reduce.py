"""The all-reduce on a CPU: ranks are processes, peers' memory is shared memory (``reduce_ranks.py``)."""

from __future__ import annotations

import importlib.util

import pytest

from tests.kernels.triton.test_interpreter import SECONDS, run

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


@pytest.mark.timeout(SECONDS)
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_get_equal_bits_and_what_the_reference_computes(ranks: int) -> None:
    run(["-m", "tests.support.kernels.reduce_ranks", str(ranks)], TRITON_INTERPRET="1")


@pytest.mark.slow
@pytest.mark.timeout(SECONDS)
def test_eight_ranks_get_equal_bits() -> None:
    run(["-m", "tests.support.kernels.reduce_ranks", "8", "few", "many"], TRITON_INTERPRET="1")
