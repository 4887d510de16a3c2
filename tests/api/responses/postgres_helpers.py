"""A PostgreSQL of the tests' own: a temporary folder, a unix socket, no TCP. Skips where there is none."""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


def _tool(name: str) -> str | None:
    found = shutil.which(name)
    if found is not None:
        return found
    versions = sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{name}"))
    return str(versions[-1]) if versions else None


def _user() -> str | None:
    """PostgreSQL does not run as root: the account to be, or None for our own."""
    if os.getuid() != 0:
        return None
    for name in ("postgres", "nobody"):
        with contextlib.suppress(KeyError):
            return pwd.getpwnam(name).pw_name
    raise AssertionError("no account to run PostgreSQL as")


@contextlib.contextmanager
def postgres() -> Iterator[str]:
    """The URL of an empty database."""
    pytest.importorskip("psycopg")
    initdb, pg_ctl = _tool("initdb"), _tool("pg_ctl")
    if initdb is None or pg_ctl is None:
        pytest.skip("PostgreSQL is not installed here")
    user = _user()
    folder = Path(tempfile.mkdtemp(prefix="pg-"))
    if user is not None:
        shutil.chown(folder, user)
    data = folder / "data"

    def run(*command: str) -> None:
        subprocess.run(
            command,
            check=True,
            capture_output=True,
            user=user,
            cwd=folder,
            env={"LC_ALL": "C", "PATH": os.environ["PATH"]},
        )

    run(initdb, "-D", str(data), "-U", "tester", "-A", "trust", "--no-sync", "-E", "UTF8")
    options = f"-c listen_addresses='' -c unix_socket_directories='{folder}' -c max_connections=30"
    run(pg_ctl, "-D", str(data), "-w", "-l", str(folder / "log"), "-o", options, "start")
    try:
        yield f"postgresql://tester@/postgres?host={folder}"
    finally:
        run(pg_ctl, "-D", str(data), "-w", "-m", "immediate", "stop")
        shutil.rmtree(folder, ignore_errors=True)
