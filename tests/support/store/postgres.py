"""A PostgreSQL server for tests, in a temporary folder on a unix socket. Skips where it is not installed."""

from __future__ import annotations

import contextlib
import ctypes
import os
import pwd
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.serve.sockets import socket_folder


def _tool(name: str) -> str | None:
    found = shutil.which(name)
    if found is not None:
        return found
    versions = sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{name}"))
    return str(versions[-1]) if versions else None


def _user() -> str | None:
    """Returns the account to run PostgreSQL as, which must not be root, or None for the current user."""
    if os.getuid() != 0:
        return None
    for name in ("postgres", "nobody"):
        with contextlib.suppress(KeyError):
            return pwd.getpwnam(name).pw_name
    raise AssertionError("no account to run PostgreSQL as")


def _end_with_parent() -> None:
    """Makes Linux end the server when the test process ends."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGQUIT)  # PR_SET_PDEATHSIG


def _wait_until_it_answers(url: str, server: subprocess.Popen[bytes]) -> None:
    import psycopg

    deadline = time.monotonic() + 60
    while True:
        try:
            psycopg.connect(url, connect_timeout=5).close()
            return
        except psycopg.OperationalError:
            assert server.poll() is None, "PostgreSQL did not start"
            assert time.monotonic() < deadline, "PostgreSQL does not answer"
            time.sleep(0.05)


def _parent(pid: str) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@contextlib.contextmanager
def hung(url: str) -> Iterator[None]:
    """Suspends all processes of a database. The kernel still accepts new connections."""
    if not Path("/proc/self/stat").exists():
        pytest.skip("processes are found in /proc")
    first = int((Path(url.partition("host=")[2]) / "data" / "postmaster.pid").read_text().split()[0])
    os.kill(first, signal.SIGSTOP)  # it starts no more children
    stopped = [first]
    try:
        for pid in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                if _parent(pid) == first:
                    stopped.append(int(pid))
                    os.kill(int(pid), signal.SIGSTOP)
        yield
    finally:
        for process in reversed(stopped):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGCONT)


@contextlib.contextmanager
def postgres() -> Iterator[str]:
    """Yields the URL of an empty database."""
    pytest.importorskip("psycopg")
    initdb, program = _tool("initdb"), _tool("postgres")
    if initdb is None or program is None:
        pytest.skip("PostgreSQL is not installed here")
    kept = socket_folder()
    folder = kept.path
    user, environment = _user(), {"LC_ALL": "C", "PATH": os.environ["PATH"]}
    if user is not None:
        shutil.chown(folder, user)
    data = str(folder / "data")
    command = [initdb, "-D", data, "-U", "tester", "-A", "trust", "--no-sync", "-E", "UTF8"]
    subprocess.run(command, check=True, capture_output=True, user=user, cwd=folder, env=environment)
    settings = {"listen_addresses": "", "unix_socket_directories": folder, "max_connections": 30}
    options = [f"--{name}={value}" for name, value in settings.items()]
    with (folder / "log").open("wb") as log:
        server = subprocess.Popen(
            [program, "-D", data, *options],
            stdout=log,
            stderr=log,
            user=user,
            cwd=folder,
            env=environment,
            preexec_fn=_end_with_parent,
        )
    url = f"postgresql://tester@/postgres?host={folder}"
    try:
        _wait_until_it_answers(url, server)
        yield url
    finally:
        server.send_signal(signal.SIGQUIT)  # an immediate shutdown
        server.wait(60)
        kept.remove()
