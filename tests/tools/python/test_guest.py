"""The interpreter of the sandbox, run without one."""

from __future__ import annotations

import json
import subprocess
import sys

from chorale.tools.python.launch import GUEST, SandboxLimits, guest_limits


def test_a_forked_child_ends_with_its_cell() -> None:
    source = b"import os\nif os.fork(): os.wait()"
    header = json.dumps({"nonce": "n", "length": len(source), "seconds": 50}).encode() + b"\n"
    limits = guest_limits(SandboxLimits(), processes=False, own_pids=False)
    command = [sys.executable, "-I", "-u", str(GUEST), limits]
    done = subprocess.run(command, input=header + source, capture_output=True, timeout=60)
    assert done.stdout == b"\0nk\0"
