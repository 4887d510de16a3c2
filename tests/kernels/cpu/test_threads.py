"""The processors of the CPU kernels' threads."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from chorale.errors import ConfigError
from chorale.kernels.cpu.library import library
from chorale.kernels.cpu.threads import NAMES, one_of_each_core, processors

linux = pytest.mark.skipif(sys.platform != "linux", reason="processors can be chosen on Linux only")


def test_two_threads_share_a_core_only_if_they_must() -> None:
    neighbours = {0: frozenset({0, 1}), 1: frozenset({0, 1}), 2: frozenset({2, 3}), 3: frozenset({2, 3})}
    assert one_of_each_core([0, 1, 2, 3], neighbours) == [0, 2, 1, 3]
    apart = {cpu: frozenset({cpu % 2, cpu % 2 + 2}) for cpu in range(4)}
    assert one_of_each_core([0, 1, 2, 3], apart) == [0, 1, 2, 3]
    assert one_of_each_core([1, 3], neighbours) == [1, 3]


@linux
@pytest.mark.parametrize("name", NAMES)
def test_what_is_asked_for(name: str) -> None:
    allowed = sorted(os.sched_getaffinity(0))
    assert processors(4, {}) is None
    assert processors(4, {name: "nobind"}) is None
    assert processors(4, {name: str(allowed[-1])}) == [allowed[-1]]
    assert processors(4, {name: f"{allowed[0]}, {allowed[0]}-{allowed[0]}"}) == [allowed[0]]
    assert len(processors(1, {name: "auto"}) or ()) == 1
    for wrong in ("some", "1-", "3-1", "0-31|32-63", "0-99999999"):
        with pytest.raises(ConfigError, match="must be nobind, auto or processors"):
            processors(4, {name: wrong})
    with pytest.raises(ConfigError, match=f"may not use processor {allowed[-1] + 1}"):
        processors(4, {name: f"{allowed[0]},{allowed[-1] + 1}"})


PRINT_AFFINITIES = """
import os, time
from chorale.kernels.cpu.threads import set_threads
before = set(os.listdir("/proc/self/task"))
set_threads(4)
for _ in range(500):  # a thread binds itself once it runs
    found = [sorted(os.sched_getaffinity(int(each))) for each in set(os.listdir("/proc/self/task")) - before]
    if all(len(each) == 1 for each in found):
        break
    time.sleep(0.02)
print(found)
print(sorted(os.sched_getaffinity(0)))
"""


@linux
@pytest.mark.skipif(library().functions is None, reason="the CPU kernels are not built")
def test_threads_stay_where_they_are_told() -> None:
    """A thread for each processor that is named, of which the caller is the first."""
    allowed = sorted(os.sched_getaffinity(0))
    chosen = allowed[-2:]
    environment = os.environ | {NAMES[0]: ",".join(map(str, chosen))}
    done = subprocess.run(
        [sys.executable, "-c", PRINT_AFFINITIES], env=environment, capture_output=True, text=True
    )
    assert done.stdout.splitlines() == [str([[cpu] for cpu in chosen[1:]]), str(allowed)], done.stderr
