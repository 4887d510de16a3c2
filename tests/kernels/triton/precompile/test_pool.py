"""Processes that compile: how they end, what they refuse, and whatever they cannot do, this process does.

That they compile is shown in ``test_contract.py``.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import triton
from triton.backends.compiler import GPUTarget

from chorale.kernels.triton.precompile import compiler as compiling
from chorale.kernels.triton.precompile import pool as pools
from chorale.kernels.triton.precompile import worker_main
from chorale.kernels.triton.precompile.compiler import Precompiler
from chorale.kernels.triton.precompile.pool import CompilePool, cache_exists, start
from tests.support import ROOT
from tests.support.event_loop import wait_until
from tests.support.kernels.fake_kernel import kernel
from tests.support.processes import children, is_running

QUICK = "tests.support.kernels.quick_worker"


@pytest.fixture(name="pool")
def open_pool(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[CompilePool]:
    monkeypatch.setattr(pools, "_MODULE", QUICK)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    found = CompilePool(2)
    assert [found.run(b""), found.run(b"")] == [False, False]  # one after the other: both have been forked
    yield found
    found.close()
    found._process.wait(30)


def test_processes_outlive_bad_tasks_and_interrupts_and_end_when_dismissed(pool: CompilePool) -> None:
    """One that dies is not waited for."""
    pids = children(pool._process.pid)
    assert len(pids) == 2
    for pid in (pool._process.pid, *pids):
        os.kill(pid, signal.SIGINT)  # of a terminal
    assert not pool.run(b"no pickle")
    assert not pool.run(b"")
    assert pool._free.qsize() == 2  # both processes are there for the next
    assert children(pool._process.pid) == pids
    os.kill(min(pids), signal.SIGKILL)
    began = time.monotonic()
    assert [pool.run(b"") for _ in range(4)] == [False] * 4
    assert time.monotonic() - began < 60  # a silent one would be waited for twice as long
    assert pool._free.qsize() == 1
    pool.close()
    pool.close()
    assert pool._process.wait(60) == 0
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    assert not pool.run(b"")


class Call:
    """Unpickled, it calls a function."""

    def __init__(self, function: Any, *arguments: object) -> None:
        self.what = function, arguments

    def __reduce__(self) -> Any:
        return self.what


@pytest.mark.parametrize(
    "call",
    [
        Call(os.mkdir, "PLACE"),
        Call(eval, "__import__('os').mkdir('PLACE')"),
        Call(worker_main._find, "os", "mkdir"),
        Call(worker_main._find, "chorale.kernels.triton.precompile.worker_main", "os.mkdir"),
        Call(triton.runtime.build._build, "PLACE"),
    ],
)
def test_a_task_that_names_anything_else_is_refused(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(pickle.UnpicklingError, match=r"is not part of a task|is not a kernel"):
        worker_main.perform(pickle.dumps((call, None, {}, {})))
    assert list(tmp_path.iterdir()) == []


def test_processes_end_with_their_parent() -> None:
    script = (
        "import os; from chorale.kernels.triton.precompile import pool as pools\n"
        f"pools._MODULE = {QUICK!r}; pool = pools.CompilePool(2); pool.run(b'')\n"
        "print(pool._process.pid, flush=True); os.kill(os.getpid(), 9)"
    )
    settings = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", script], env=settings, capture_output=True, timeout=300)
    wait_until(lambda: not is_running(int(done.stdout)), "their end", 10)


class Refusing:
    """A pool that does nothing."""

    size = 2

    def __init__(self) -> None:
        self.tasks: list[bytes] = []
        self.is_closed = False

    def run(self, task: bytes) -> bool:
        self.tasks.append(task)
        return False

    def close(self) -> None:
        self.is_closed = True


@pytest.mark.parametrize("can_be_told", [True, False])
def test_kernels_that_the_pool_fails_to_compile_are_compiled_here(
    can_be_told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiling, "is_cached", lambda key, name: False)
    pool, cache = Refusing(), {}
    compiler = Precompiler(lambda: pool)  # type: ignore[arg-type, return-value]
    src, target, env_vars = SimpleNamespace(name="a"), None, {}
    options = SimpleNamespace(number=1) if can_be_told else SimpleNamespace(function=lambda: None)

    def async_compile() -> Any:
        return kernel(src.name) if (target, options, env_vars) else None

    with compiler.recording():
        compiler.submit("a", async_compile, lambda found: cache.update(a=found))
    compiler.wait(1, lambda *_: None)
    assert cache["a"].function == "a"
    assert (compiler.num_here, len(pool.tasks)) == (1, int(can_be_told))
    wait_until(lambda: pool.is_closed, "the pool's end", 5)


def test_too_few_cores_or_no_process_mean_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    assert start(1) is None

    def fail(size: int) -> CompilePool:
        raise OSError("no more processes")

    monkeypatch.setattr(pools, "CompilePool", fail)
    assert start(8) is None


def test_a_mark_of_an_earlier_start_is_seen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from triton.runtime.cache import get_cache_manager

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    assert not cache_exists()
    get_cache_manager(pools.MANIFESTS).put("{}", "some.json", binary=False)
    assert cache_exists()


def test_launchers_are_compiled_where_there_are_any(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    nvidia = SimpleNamespace(make_launcher=None, CudaLauncher=lambda src, metadata: made.append(src.name))
    monkeypatch.setattr(worker_main, "nvidia", nvidia)
    found = kernel("a")
    worker_main.prepare_launcher(found)
    assert made == []  # for another back end
    found.metadata.target = GPUTarget("cuda", 90, 32)
    worker_main.prepare_launcher(found)
    assert made == ["a"]
