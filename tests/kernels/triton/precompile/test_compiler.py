"""Kernels that compile in threads: order, waiting, failures, and those that nobody foresaw."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable
from typing import Any

import pytest

from chorale.kernels.triton.precompile.compiler import PendingKernel, Precompiler
from tests.support.kernels.fake_kernel import kernel


def ask(
    precompiler: Precompiler, cache: dict[str, Any], name: str, make: Callable[[], Any] | None = None
) -> Any:
    """As Triton does when a launch finds nothing in its cache."""
    return precompiler.submit(name, make or (lambda: kernel(name)), lambda found: cache.update({name: found}))


def test_recorded_kernels_are_compiled_afterwards() -> None:
    precompiler, cache, begun = Precompiler(), {}, threading.Event()
    with precompiler.recording():
        for name in "abc":
            ask(precompiler, cache, name, lambda name=name: begun.set() or kernel(name))
        assert all(isinstance(found, PendingKernel) for found in cache.values())
        assert not begun.is_set()
    told: list[tuple[int, int]] = []
    precompiler.wait(3, lambda done, count: told.append((done, count)))
    assert told[-1] == (3, 3)
    assert [cache[name].function for name in "abc"] == ["a", "b", "c"]
    assert not any(isinstance(found, PendingKernel) for found in cache.values())
    assert (precompiler.num_kernels, precompiler.num_late) == (3, 0)


def test_a_launch_waits_for_a_kernel_that_is_being_compiled() -> None:
    precompiler, cache, go = Precompiler(), {}, threading.Event()
    with precompiler.recording():
        ask(precompiler, cache, "slow", lambda: go.wait(10) and kernel("slow"))
        ask(precompiler, cache, "next")
    threading.Timer(0.05, go.set).start()
    assert cache["slow"].function == "slow"  # Triton 3.9 takes it from its cache, ...
    assert ask(precompiler, cache, "next").function == "next"  # 3.6 asks again
    assert precompiler.num_late == 0


def test_an_unrecorded_kernel_is_compiled_at_its_launch_and_counted() -> None:
    precompiler, cache = Precompiler(), {}
    assert ask(precompiler, cache, "new").function == "new"
    assert cache["new"].function == "new"
    assert (precompiler.num_kernels, precompiler.num_late) == (0, 1)


def test_a_kernel_that_does_not_compile_raises_at_its_launch() -> None:
    def fail() -> Any:
        raise RuntimeError("no such instruction")

    precompiler, cache = Precompiler(), {}
    with precompiler.recording():
        ask(precompiler, cache, "bad", fail)
        ask(precompiler, cache, "good")
    precompiler.wait(2, lambda *_: None)  # does not hang, and does not raise
    assert cache["good"].function == "good"
    for _ in range(2):
        with pytest.raises(RuntimeError, match="no such instruction"):
            ask(precompiler, cache, "bad", fail)


def test_launches_of_other_threads_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime.jit import JITFunction

    seen: list[bool] = []
    monkeypatch.setattr(JITFunction, "run", lambda self, *, grid, warmup: seen.append(warmup))
    precompiler = Precompiler()

    def launch() -> None:
        JITFunction.run(None, grid=(1,), warmup=False)

    with precompiler.recording():
        launch()
        other = threading.Thread(target=contextvars.copy_context().run, args=(launch,))
        other.start()
        other.join()
    launch()
    assert seen == [True, False, False]


def test_few_threads_beside_steps() -> None:
    precompiler, cache, go = Precompiler(), {}, threading.Event()
    with precompiler.recording():
        for number in range(40):
            ask(precompiler, cache, str(number), lambda: go.wait(10) and kernel("x"))
    precompiler.throttle()
    go.set()
    precompiler.wait(40, lambda *_: None)
    assert precompiler.num_kernels == 40
    with precompiler.recording():
        ask(precompiler, cache, "last")
    precompiler.wait(41, lambda *_: None)
    assert cache["last"].function == "last"
