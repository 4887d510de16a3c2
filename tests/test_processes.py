"""A child ends with its parent even where the system sends it no signal."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys

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
