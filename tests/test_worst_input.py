"""tests/support/fuzz/worst_input.py detects each kind of excessive cost, and nothing else."""

from __future__ import annotations

import asyncio
import json
import time

import pytest

from tests.support.fuzz.worst_input import MAX_HELD_SECONDS, check_linear, measure, watched

CONTAINERS = b"[" + b"{}," * 5_000_000 + b"1]"


def spin(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def test_a_call_that_holds_the_interpreter_lock_is_detected() -> None:
    cost = measure(lambda: json.loads(CONTAINERS), len(CONTAINERS))
    assert cost.held_seconds > MAX_HELD_SECONDS
    assert cost.memory > 10
    with pytest.raises(AssertionError):
        cost.check()


def test_python_code_that_releases_the_lock_is_only_cpu_time() -> None:
    cost = measure(lambda: spin(0.5), 10**6)
    assert 0.4 < cost.cpu_seconds < 1
    cost.check(max_cpu_seconds=1)
    with pytest.raises(AssertionError):
        cost.check(max_cpu_seconds=0.1)


def test_a_callback_that_blocks_the_event_loop_is_detected() -> None:
    async def main(seconds: float) -> float:
        async with watched() as cost:
            for _ in range(5):
                spin(seconds)
                await asyncio.sleep(0.005)
        return cost.held_seconds

    assert asyncio.run(main(0.1)) >= 0.1
    assert asyncio.run(main(0.01)) < 0.05


def test_quadratic_work_is_detected() -> None:
    check_linear(lambda size: (lambda: spin(size / 1000), size), 20)
    with pytest.raises(AssertionError):
        check_linear(lambda size: (lambda: spin(size * size / 40_000), size), 20)


def test_an_error_of_the_call_is_raised() -> None:
    with pytest.raises(ZeroDivisionError):
        measure(lambda: 1 / 0, 1)
