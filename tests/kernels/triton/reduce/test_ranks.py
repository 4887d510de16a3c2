"""The all-reduce, and sampling, over ranks on a CPU: ranks are processes, peers' memory is shared memory."""

from __future__ import annotations

import importlib.util

import pytest

from tests.kernels.triton.test_interpreter import SECONDS, run

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
Scenarios = dict[str, list[str]]  # of a script in tests/support/kernels; none: all


def run_ranks(size: int, scenarios: Scenarios) -> None:
    calls = [
        f"{script}.run({size}, {names or f'list({script}.SCENARIOS)'})" for script, names in scenarios.items()
    ]
    program = f"from tests.support.kernels import {', '.join(scenarios)}\n" + "\n".join(calls)
    run(["-c", program], TRITON_INTERPRET="1")


@pytest.mark.timeout(SECONDS)
def test_two_ranks_reduce_to_equal_bits_and_sample_what_one_does() -> None:
    """A few rows, and rows with filters; the other scenarios take longer."""
    run_ranks(2, {"reduce_ranks": ["few"], "sample_ranks": ["cost", "absent"]})


@pytest.mark.slow
@pytest.mark.timeout(SECONDS)
@pytest.mark.parametrize(("size", "scenarios"), [(2, []), (4, []), (8, ["few", "many"])])
def test_more_ranks_get_equal_bits(size: int, scenarios: list[str]) -> None:
    run_ranks(size, {"reduce_ranks": scenarios})


@pytest.mark.slow
@pytest.mark.timeout(SECONDS)
@pytest.mark.parametrize(("size", "scenarios"), [(2, []), (4, ["ties", "cost"]), (8, ["mixed"])])
def test_more_ranks_and_filters(size: int, scenarios: list[str]) -> None:
    run_ranks(size, {"sample_ranks": scenarios})
