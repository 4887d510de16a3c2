"""No daemon of Ray outlives a test program that is killed with SIGKILL."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import ROOT
from tests.support.event_loop import wait_until

PROGRAM = """
import time
from tests.support.serve.ray_cluster import ray_cluster
with ray_cluster(2):
    print("up", flush=True)
    time.sleep(600)
"""
SECONDS = 30.0  # time limit for the daemons to end


def users_of(folder: Path) -> list[str]:
    """Returns the command lines of the processes that have open files in ``folder``."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            opened = [os.readlink(each) for each in (entry / "fd").iterdir()]
        except OSError:
            continue
        if any(each.startswith(str(folder)) for each in opened):
            found.append((entry / "cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace"))
    return found


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs the extra ray")
def test_nothing_of_a_cluster_outlives_a_killed_program() -> None:
    environment = {
        name: text for name, text in os.environ.items() if name not in ("CHORALE_TEST_RUN", "TMPDIR")
    }
    environment["PYTHONPATH"] = str(ROOT)
    before = set(Path("/tmp").glob("chorale-run-*"))
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, text=True, env=environment, cwd=ROOT
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        folders = [
            each for each in set(Path("/tmp").glob("chorale-run-*")) - before if (each / "ray").exists()
        ]
        assert any(users_of(folder) for folder in folders)
    finally:
        process.kill()
        process.communicate()
    wait_until(lambda: not any(map(users_of, folders)), "the end of the daemons", SECONDS)
