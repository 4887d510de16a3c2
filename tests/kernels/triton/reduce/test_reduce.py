"""The all-reduce on a CPU: ranks are processes, peers' memory is shared memory (``reduce_ranks.py``)."""

from __future__ import annotations

import importlib.util

import pytest

from tests.kernels.triton.test_interpreter import SECONDS, run

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


@pytest.mark.timeout(SECONDS)
def test_two_ranks_get_equal_bits_and_what_the_reference_computes() -> None:
    """A few rows; the other scenarios take longer."""
    run(["-m", "tests.support.kernels.reduce_ranks", "2", "few"], TRITON_INTERPRET="1")


@pytest.mark.slow
@pytest.mark.timeout(SECONDS)
@pytest.mark.parametrize(("ranks", "scenarios"), [(2, []), (4, []), (8, ["few", "many"])])
def test_more_ranks_get_equal_bits(ranks: int, scenarios: list[str]) -> None:
    """Without names: all scenarios."""
    run(["-m", "tests.support.kernels.reduce_ranks", str(ranks), *scenarios], TRITON_INTERPRET="1")
