"""CPython on WebAssembly in a separate process that drops its privileges before it receives code."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from chorale.tools.python.launch import GUEST, SandboxLaunch, SandboxLimits, guest_limits

_RUNTIME_BYTES = 96 * 2**20  # the process without the code's memory and files: 60 MiB measured
_START = "import sys; sys.path[:] = {path!r}; from chorale.tools.python.wasm.host import main; main()"


def wasm(limits: SandboxLimits) -> SandboxLaunch:
    start = {
        "parent_pid": os.getpid(),
        "memory_bytes": limits.memory_bytes,
        "disk_bytes": min(limits.disk_bytes, limits.memory_bytes // 2),
        "arguments": [
            "python", "-I", "-u", "-X", "utf8", "-c", GUEST.read_text("utf-8"),
            guest_limits(limits, processes=False, own_pids=False),
        ],
        "environment": {"HOME": "/tmp", "LANG": "C.UTF-8"},
    }  # fmt: skip
    root = str(Path(__file__).resolve().parents[3])
    path = [root, *(entry for entry in sys.path if os.path.isabs(entry) and entry != root)]
    argv = (sys.executable, "-I", "-u", "-c", _START.format(path=path), json.dumps(start))
    wanted = ("HOME", "XDG_CACHE_HOME", "TMPDIR")  # they determine where the compiled interpreter is cached
    environment = {name: os.environ[name] for name in wanted if name in os.environ}
    return SandboxLaunch(
        argv,
        environment,
        watch_bytes=limits.memory_bytes + _RUNTIME_BYTES,
        own_timer=False,
        start_seconds=600.0,  # the first start compiles, at low priority
    )
