"""A child ends with its parent, even where the system sends it no signal, and imports the same package."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import chorale
from chorale.machine.processes import module_command
from chorale.machine.signals import signals_as_exceptions

CHILD = """
import os, sys, time
sys.platform = "another"
from chorale.machine.processes import die_with_parent
die_with_parent(int(sys.argv[1]))
print(os.getpid(), flush=True)
time.sleep(600)  # the main thread hangs
"""
PARENT = """
import os, subprocess, sys, time
from chorale.machine.processes import die_with_parent
die_with_parent(int(sys.argv[1]))
subprocess.Popen([sys.executable, "-c", sys.argv[2], str(os.getpid())])
time.sleep(600)
"""


def test_a_child_that_gets_no_signal_ends_with_its_parent() -> None:
    command = [sys.executable, "-c", PARENT, str(os.getpid()), CHILD]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        child = int(parent.stdout.readline())
        parent.kill()
        try:
            assert parent.communicate(timeout=60) == ("", None)  # the pipe closes when the child has ended
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
            raise


def test_a_signal_in_a_destructor_is_not_lost() -> None:
    """Python ignores exceptions there."""

    class Signals:
        def __del__(self) -> None:
            os.kill(os.getpid(), signal.SIGHUP)

    def wait() -> None:
        with signals_as_exceptions():
            Signals()
            time.sleep(60)

    with pytest.raises(SystemExit) as caught:
        wait()
    assert caught.value.code == 128 + signal.SIGHUP


def test_children_do_not_import_from_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Servers, engines and ranks: all are started by ``module_command``, as the last test shows."""
    (tmp_path / "chorale").mkdir()
    (tmp_path / "chorale" / "__init__.py").write_text("raise SystemExit(9)\n", "utf-8")
    monkeypatch.chdir(tmp_path)
    assert subprocess.run([sys.executable, "-m", "chorale"], check=False).returncode == 9
    assert subprocess.run([*module_command("chorale"), "--version"], check=False).returncode == 0


def test_a_child_imports_the_package_that_its_parent_found_by_a_relative_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = str(Path(chorale.__file__).resolve().parents[1])
    monkeypatch.setattr(sys, "path", ["", *(entry for entry in sys.path if os.path.realpath(entry) != root)])
    ended = subprocess.run([*module_command("chorale"), "--version"], cwd=tmp_path, check=False)
    assert ended.returncode == 0


def test_every_module_of_the_package_runs_in_a_child_by_module_command() -> None:
    package = Path(chorale.__file__).parent
    assert not [path for path in package.rglob("*.py") if '"-m", "chorale' in path.read_text("utf-8")]
