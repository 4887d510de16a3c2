"""The all-reduce, and sampling, over ranks on a CPU: ranks are processes, peers' memory is shared memory.

Run as ``twins.py``, through ``test_interpreter.py`` only: ``tests/gpu/test_all_reduce.py`` is for GPUs.
"""

from __future__ import annotations

import pytest

from tests.support.kernels import reduce_ranks, sample_ranks

EVERY = [(2, [*reduce_ranks.SCENARIOS]), (4, [*reduce_ranks.SCENARIOS]), (8, ["few", "many"])]
SAMPLED = [(2, [*sample_ranks.SCENARIOS]), (4, ["ties", "cost"]), (8, ["mixed"])]


def test_two_ranks_reduce_to_equal_bits_and_sample_what_one_does() -> None:
    """A few rows, and rows with filters; the other scenarios take longer."""
    reduce_ranks.run(2, ["few"])
    sample_ranks.run(2, ["cost", "absent"])


@pytest.mark.slow
@pytest.mark.parametrize(("size", "scenarios"), EVERY)
def test_more_ranks_get_equal_bits(size: int, scenarios: list[str]) -> None:
    reduce_ranks.run(size, scenarios)


@pytest.mark.slow
@pytest.mark.parametrize(("size", "scenarios"), SAMPLED)
def test_more_ranks_and_filters(size: int, scenarios: list[str]) -> None:
    sample_ranks.run(size, scenarios)
