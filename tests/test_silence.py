"""A process that sleeps, spins or is stopped counts as silent, one that waits for a processor does not."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from chorale.machine.processes import Pulse, Silence, ThreadTimes, threads_of
from tests.support.event_loop import wait_until
from tests.support.serve.quota import cpu_quota, has_quotas

SPIN = (sys.executable, "-c", "while True: pass")
DEADLINE = 120.0  # seconds, enough for a busy machine


@contextmanager
def child(*command: str) -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(command) as process:
        try:
            yield process
        finally:
            process.kill()


def exceeds(pid: int, limit: float, within: float) -> bool:
    began = time.monotonic()
    silence = Silence(pid, began)
    while time.monotonic() - began < within:
        time.sleep(0.05)
        if silence.exceeds(time.monotonic(), limit):
            return True
    return False


@pytest.mark.parametrize(
    ("command", "stopped"),
    [(("sleep", "600"), False), (SPIN, True), (SPIN, False)],
    ids=["sleeps", "stopped", "spins"],
)
def test_a_sleeping_stopped_or_spinning_process_is_silent(command: tuple[str, ...], stopped: bool) -> None:
    with child(*command) as process:
        if stopped:
            process.send_signal(signal.SIGSTOP)
        assert exceeds(process.pid, 1.0, DEADLINE)


@pytest.mark.skipif(not has_quotas(), reason="needs a control group for CPU quotas")
def test_a_process_under_a_quota_is_silent_only_while_it_runs() -> None:
    """At 2 % of a core it could run for 0.05 s of these 2.5 s."""
    with cpu_quota(2) as enter, child(*SPIN) as process:
        enter(process.pid)
        time.sleep(0.5)
        assert not exceeds(process.pid, 1.0, 2.5)


def test_the_threads_of_a_process_are_found_with_their_times() -> None:
    with child(*SPIN) as process:
        wait_until(lambda: threads_of(process.pid)[str(process.pid)].on_cpu > 0.3, "work", DEADLINE)
        threads = threads_of(process.pid)
        assert threads[str(process.pid)].is_runnable
        assert threads[str(process.pid)].on_cpu > 0.3
    assert threads_of(process.pid) == {}  # it has ended


# --------------------------------------------------------------------------- rules, with given thread times

States = Callable[[float], tuple[bool, float, float]]  # time -> runnable, seconds on a CPU, seconds waited


def counted(states: States, seconds: int = 100, step: float = 0.5) -> float:
    """Returns the counted silence after ``seconds``, checked every ``step`` seconds."""
    now = 0.0
    silence = Silence(1, 0.0, lambda pid: {"1": ThreadTimes(*states(now)), "2": ThreadTimes(False, 1.0, 1.0)})
    while now < seconds:
        now += step
        silence.exceeds(now, 4.0)
    return silence.seconds


@pytest.mark.parametrize(
    ("states", "least", "most"),
    [
        pytest.param(lambda now: (False, 1.0, 0.0), 100, 100, id="asleep"),
        pytest.param(lambda now: (True, now, 0.0), 100, 100, id="spinning alone"),
        pytest.param(lambda now: (True, now / 4, now * 3 / 4), 25, 28, id="spinning on a quarter of a core"),
        pytest.param(lambda now: (True, now / 10, 0.0), 10, 13, id="throttled: no wait is counted"),
        pytest.param(lambda now: (True, 1.0, now), 1, 2, id="waits, which the system counts"),
        pytest.param(lambda now: (True, 1.0, 0.0), 1, 2, id="waits for ever"),
        pytest.param(lambda now: (now % 1 == 0, now / 2, 0.0), 100, 100, id="sleeps now and then"),
    ],
)
def test_time_asleep_or_on_a_processor_counts_as_silence(states: States, least: float, most: float) -> None:
    """Thread times are read after a quarter of the limit (4 s), and compared from the next check on."""
    assert least <= counted(states) <= most


def test_a_process_that_cannot_be_seen_gets_twice_the_time() -> None:
    silence = Silence(None, 0.0)
    looks = [silence.exceeds(look / 2, 4.0) for look in range(1, 16)]
    assert looks == [False] * 13 + [True, True]  # after 7 s: time counts in full at first, then half


def test_a_late_check_counts_one_second() -> None:
    silence = Silence(1, 0.0, lambda pid: {"1": ThreadTimes(False, 1.0, 1.0)})
    assert not silence.exceeds(1000.0, 4.0)
    assert silence.seconds == 1.0


def test_a_sign_of_life_ends_a_silence() -> None:
    silence = Silence(None, 0.0)
    for look in range(1, 4):
        assert not silence.exceeds(float(look), 10.0)
    silence.hear(4.0)
    assert silence.seconds == 0.0


def test_steps_that_follow_each_other_are_not_one_step() -> None:
    """Each sign of life is from another step, although the steps take longer than the limit."""
    pulse = Pulse(None, 0.0)
    for look in range(1, 50):
        pulse.hear(float(look), 0.9)
        assert not pulse.is_stuck(float(look), 0.5)
