"""Sampling over ranks on a CPU: ranks are processes, peers' memory is shared memory (``sample_ranks.py``)."""

from __future__ import annotations

import importlib.util

import pytest

from tests.kernels.triton.test_interpreter import SECONDS, run

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


@pytest.mark.timeout(SECONDS)
def test_two_ranks_keep_and_draw_what_one_does_and_exchange_little() -> None:
    """Rows with filters; the other scenarios take longer."""
    scenarios = ("cost", "absent")
    run(["-m", "tests.support.kernels.sample_ranks", "2", *scenarios], TRITON_INTERPRET="1")


@pytest.mark.slow
@pytest.mark.timeout(SECONDS)
@pytest.mark.parametrize(("ranks", "scenarios"), [(2, []), (4, ["ties", "cost"]), (8, ["mixed"])])
def test_more_ranks_and_filters(ranks: int, scenarios: list[str]) -> None:
    """Without names: all scenarios."""
    run(["-m", "tests.support.kernels.sample_ranks", str(ranks), *scenarios], TRITON_INTERPRET="1")
