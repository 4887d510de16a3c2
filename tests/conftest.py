"""Set-up of all tests: torch uses one thread (on a busy two-core machine, two threads wait for each other in
each matrix product), and a reaper removes the run's temporary folder and all processes that it started.
"""

from __future__ import annotations

import asyncio
import gc
import inspect
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest

from chorale.config.engine import ToolConfig
from chorale.machine.folders import Folder
from chorale.machine.hardware import cpu_count
from chorale.machine.processes import collect_rarely, die_with_parent, tune_garbage_collector
from tests.support import REAPER, ROOT
from tests.support.event_loop import run
from tests.support.serve.sockets import socket_folder

RUN = "CHORALE_TEST_RUN"  # environment variable with the main process's id, for the workers
reaper = pytest.StashKey[subprocess.Popen[bytes]]()


def pytest_configure(config: pytest.Config) -> None:
    """Starts the reaper, so that nothing that tests start outlives the run."""
    collect_rarely()
    if hasattr(config, "workerinput"):  # a worker of pytest-xdist
        die_with_parent(int(os.environ[RUN]))
        return
    if "MAKELEVEL" in os.environ:
        die_with_parent(os.getppid())
    made = Folder().path
    made.chmod(0o711)  # PostgreSQL and sandboxes run as other users
    folder = str(made)
    command = [sys.executable, "-I", str(REAPER), str(os.getpid()), folder]
    # In a new session, so that a signal to the run's process group does not reach it.
    config.stash[reaper] = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True, cwd="/")
    # Servers that tests start keep their store in this folder, not in the developer's.
    os.environ |= {RUN: str(os.getpid()), "TMPDIR": folder, "XDG_STATE_HOME": f"{folder}/state"}
    # Programs that tests start import tests.support, wherever they run.
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    os.environ.pop("XDG_RUNTIME_DIR", None)  # sockets are in our folder, too, if its path is short enough
    tempfile.tempdir = None


# These folders and files have few but long tests. They start first, so that no worker is idle at the end.
FIRST = (
    "test_killed_run.py",
    "serve",
    "acceptance",
    "kernels",
    "parallel",
    "cli",
    "runtime",
    "tools",
    "docs",
    "llm",
    "demo",
    "training",
    "test_typing.py",
)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int | None:
    """Returns one more than the number of cores: tests wait for the processes that they start, and with one
    worker for each core, a third of two cores is idle."""
    if "PYTEST_XDIST_AUTO_NUM_WORKERS" in os.environ:
        return None  # pytest-xdist reads it
    return cpu_count() + 1


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    tests = ROOT / "tests"
    order = {str(tests / name): number for number, name in enumerate(FIRST)}

    def order_of(item: pytest.Item) -> int:
        below = (path for path in (item.path, *item.path.parents) if path.parent == tests)
        return order.get(str(next(below, None)), len(FIRST))

    items.sort(key=order_of)


def pytest_collection_finish() -> None:
    """Excludes the collected tests and their imports, which stay until the end, from garbage collection."""
    tune_garbage_collector()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Runs a coroutine test in a new event loop, with ``RUN`` of its module or else ``run``."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    test = pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names})
    getattr(pyfuncitem.module, "RUN", run)(test)
    return True


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    skipped = terminalreporter.stats.get("skipped", [])
    reasons = Counter(report.longrepr[2].removeprefix("Skipped: ").split("\n")[0] for report in skipped)
    for reason, count in reasons.most_common():
        terminalreporter.write_line(f"{count} skipped: {reason[:110]}")


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput") and "coverage" not in sys.modules:
        os._exit(0)  # it has sent its results, and would spend three seconds on freeing all modules
    gc.unfreeze()  # otherwise Triton's bindings report leaked types on stderr
    process = config.stash.get(reaper, None)
    if process is not None:
        process.communicate()


@pytest.fixture(scope="session", autouse=True)
def one_torch_thread() -> None:
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)


@pytest.fixture(scope="session")
def python_sandbox() -> str:
    """Returns the sandbox that ``--python-tool auto`` finds here. Skips the test without one."""
    from chorale.tools.service import probe_tools

    found = asyncio.run(probe_tools(ToolConfig(python="auto"), os.environ))
    if "python" not in found.available:
        pytest.skip(f"no sandbox for the python tool: {found.missing['python']}")
    if found.available["python"].startswith("wasm"):
        # On a busy machine, a server compiles it on a tenth of a core: the first test would wait a minute.
        compiling = "module.hurry(); module.compile_in_child()"
        code = f"from chorale.tools.python.wasm import module; {compiling}"
        subprocess.run([sys.executable, "-c", code], check=True, timeout=300)
    return found.available["python"]


@pytest.fixture
def sockets() -> Iterator[Path]:
    with socket_folder() as folder:
        yield folder


@pytest.fixture(scope="session")
def postgres_url() -> Iterator[str]:
    from tests.support.store.postgres import postgres

    with postgres() as url:
        yield url


@pytest.fixture
def database(postgres_url: str) -> str:
    """Returns the URL of the session's PostgreSQL, after emptying it."""
    import psycopg

    with psycopg.connect(postgres_url, autocommit=True) as connection:
        connection.execute("SET client_min_messages = warning")
        connection.execute("DROP SCHEMA IF EXISTS chorale CASCADE")
    return postgres_url
