"""The threads of the CPU kernels: their number, and the processors to which they are bound.

``CHORALE_CPU_THREADS_BIND``, or vLLM's name ``VLLM_CPU_OMP_THREADS_BIND``, is ``nobind`` (the default:
threads are not bound), ``auto`` (each on a separate core) or processors such as ``0-3,6``, one thread each.
The thread that calls the kernels is never bound, because other threads would inherit the binding.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from ctypes import c_int
from pathlib import Path

from chorale.errors import ConfigError
from chorale.kernels.cpu.library import library

NAMES = ("CHORALE_CPU_THREADS_BIND", "VLLM_CPU_OMP_THREADS_BIND")
_RANGE = re.compile(r"(\d{1,6})(?:-(\d{1,6}))?")
_CPUS = Path("/sys/devices/system/cpu")


def set_threads(count: int) -> None:
    """Set the number of this process's threads to ``count``, or to the number of named processors."""
    chosen = processors(count, os.environ)
    if chosen is None:
        library().set_threads(count, None)
    else:
        library().set_threads(len(chosen), (c_int * len(chosen))(*chosen))


def processors(count: int, environment: Mapping[str, str]) -> list[int] | None:
    """Returns the processor of each thread, or None if they are not bound. Raises ``ConfigError``."""
    name = next((name for name in NAMES if environment.get(name)), None)
    value = "nobind" if name is None else environment[name].strip().lower()
    if value == "nobind":
        return None
    if not hasattr(os, "sched_getaffinity"):
        if value == "auto":
            return None
        raise ConfigError(f"{name}={value}: threads can be bound to processors on Linux only")
    allowed = sorted(os.sched_getaffinity(0))
    if value == "auto":
        return one_of_each_core(allowed, {cpu: _siblings(cpu) for cpu in allowed})[:count]
    chosen = _listed(value)
    if chosen is None:
        raise ConfigError(f"{name}={value}: must be nobind, auto or processors such as 0-3,6")
    if missing := sorted(set(chosen) - set(allowed)):
        raise ConfigError(f"{name}={value}: this process may not use processor {missing[0]}")
    return chosen


def one_of_each_core(allowed: Sequence[int], siblings: Mapping[int, frozenset[int]]) -> list[int]:
    """Returns the first processor of each core, then the others."""
    first: list[int] = []
    for cpu in allowed:
        if not siblings[cpu].intersection(first):
            first.append(cpu)
    return [*first, *(cpu for cpu in allowed if cpu not in first)]


def _siblings(cpu: int) -> frozenset[int]:
    try:
        text = (_CPUS / f"cpu{cpu}" / "topology" / "thread_siblings_list").read_text("ascii").strip()
    except OSError:
        return frozenset({cpu})
    return frozenset(_listed(text) or [cpu])


def _listed(text: str) -> list[int] | None:
    """Returns the numbers in a list such as ``0-3,6``, in order, or None for other texts."""
    found: list[int] = []
    for part in text.split(","):
        match = _RANGE.fullmatch(part.strip())
        if match is None:
            return None
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first or last - first > 4096:
            return None
        found += range(first, last + 1)
    return list(dict.fromkeys(found))
