"""A test run that is killed with SIGKILL in the middle leaves no process, no socket and no folder."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from chorale.machine.folders import Folder
from tests.support.event_loop import wait_until
from tests.support.serve.reaper import started

ROOT = Path(__file__).parents[1]
SECONDS = 30.0  # time limit of the clean-up


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder for the run's temporary files. The path of pytest's own is too long for sockets."""
    with Folder("/tmp") as path:
        yield path


pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@pytest.mark.parametrize("workers", [pytest.param("0", marks=pytest.mark.slow), "2"])
def test_nothing_is_left_of_a_killed_run(workers: str, folder: Path) -> None:
    """The run is killed once it has started an engine process."""
    tests = "tests/serve/test_supervisor.py"
    command = [sys.executable, "-m", "pytest", "-n", workers, "-p", "no:cacheprovider", tests]
    environment = os.environ | {"TMPDIR": str(folder)}
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )

    def children() -> dict[int, str]:
        return started(str(folder), process.pid)

    try:
        wait_until(lambda: any("fake_engine" in line for line in children().values()), "an engine process")
        assert len(list(folder.iterdir())) == 1
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    try:
        wait_until(lambda: not children(), "the end of all processes", SECONDS)
        wait_until(lambda: not list(folder.iterdir()), "the end of all files", SECONDS)
    finally:
        print("left:", children(), list(folder.iterdir()))
