"""Kills the processes of a test run and removes its folder once the run has ended, also by SIGKILL.

``python -I reaper.py RUN FOLDER``, started by ``conftest.py``. RUN is the pid of the process that runs the
tests or distributes them to workers. Its processes have FOLDER in their environment (TMPDIR), arguments or
working folder; those of Ray have logs open in it.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

GRACE = 2.0  # seconds that processes have to end by themselves after a regular end of the run
MOST = 15.0  # longest time for killing, in seconds
PROC = Path("/proc")


def wait_for_end(run: int) -> None:
    """Waits until the run closes this process's stdin, or has died while a child still has the pipe open."""
    while os.getppid() == run and not select.select([0], [], [], 0.5)[0]:
        pass


def started(folder: str, run: int) -> dict[int, str]:
    """Returns the running processes of the run with their command lines; empty without /proc."""
    wanted, found = folder.encode(), {}
    for entry in PROC.glob("[0-9]*"):
        pid = int(entry.name)
        if pid in (run, os.getpid()):
            continue
        try:
            command = (entry / "cmdline").read_bytes()
            places = [command, (entry / "environ").read_bytes(), os.fsencode((entry / "cwd").readlink())]
            if command.startswith(b"ray::"):  # Ray's daemons write their name over arguments and environment
                places += [os.fsencode(os.readlink(each)) for each in (entry / "fd").iterdir()]
        except OSError:  # it has ended, or belongs to another user
            continue
        if any(wanted in place for place in places):
            found[pid] = command.replace(b"\0", b" ").decode("utf-8", "replace")
    return found


def reap(folder: str, run: int) -> dict[int, str]:
    """Kills remaining processes until none is left. Returns the killed ones."""
    killed: dict[int, str] = {}
    deadline = time.monotonic() + MOST
    while time.monotonic() < deadline and (left := started(folder, run)):
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        killed |= left
        time.sleep(0.1)
    return killed


def main(run: int, folder: str) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    wait_for_end(run)
    in_order, until = os.getppid() == run, time.monotonic() + GRACE
    while in_order and time.monotonic() < until and started(folder, run):
        time.sleep(0.05)
    killed = reap(folder, run)
    # Tests of the sandbox nest folders deeper than shutil.rmtree recurses.
    subprocess.run(["rm", "-rf", folder], check=False)
    if in_order and killed:
        sys.stderr.write(f"these outlived the tests and were killed: {killed}\n")


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
