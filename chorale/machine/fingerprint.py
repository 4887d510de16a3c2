"""A description of the machine for benchmark results, without paths, user names and host names."""

from __future__ import annotations

import platform
import time
from typing import Any

from chorale.machine import facts as machine
from chorale.machine.hardware import cpu_count, total_memory
from chorale.version import __version__


def fingerprint() -> dict[str, Any]:
    """Returns hardware and versions as a JSON-serialisable dict."""
    return {
        "date": time.strftime("%Y-%m-%d %H:%M:%S %Z"),
        "chorale": __version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "cpu": machine.cpu_name(),
        "cores": cpu_count(),
        "memory_gib": round(total_memory() / 2**30, 1),
        "gpus": [
            {"name": gpu.name, "memory_gib": round(gpu.total_bytes / 2**30, 1), "driver": gpu.driver}
            for gpu in machine.gpus()
        ],
        "torch": machine.version_of("torch"),
        "triton": machine.version_of("triton"),
    }
