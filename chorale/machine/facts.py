"""Properties of this machine, for ``doctor``, ``fit``, ``collect-env`` and benchmarks. Imports no torch."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chorale.machine import nvidia_smi
from chorale.machine.hardware import cpu_count, total_memory
from chorale.version import __version__


@dataclass(frozen=True, slots=True)
class Gpu:
    name: str
    total_bytes: int
    free_bytes: int
    driver: str
    uuid: str = ""


def gpus() -> list[Gpu]:
    """Returns the NVIDIA GPUs that ``nvidia-smi`` lists, or an empty list."""
    rows = nvidia_smi.query("gpu", "name", "memory.total", "memory.free", "driver_version", "uuid")
    return [gpu for row in rows if (gpu := _parse_gpu(row)) is not None]


def _parse_gpu(row: list[str]) -> Gpu | None:
    name, total, free, driver, uuid = row
    try:
        return Gpu(name, int(total) * 2**20, int(free) * 2**20, driver, uuid)
    except ValueError:
        return None


def cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def hub_cache() -> Path:
    """Returns the Hugging Face cache folder (HF_HUB_CACHE, HF_HOME, XDG_CACHE_HOME, or the default)."""
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if os.environ.get(name):
            return Path(os.environ[name]).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.environ.get("HF_HOME") or f"{base}/huggingface").expanduser() / "hub"


def version_of(name: str) -> str | None:
    """Returns the version of an installed package, or None."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def fingerprint() -> dict[str, Any]:
    """Returns hardware and versions as a JSON-serialisable dict for benchmark results, without paths, user
    names and host names."""
    return {
        "date": time.strftime("%Y-%m-%d %H:%M:%S %Z"),
        "chorale": __version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "cpu": cpu_name(),
        "cores": cpu_count(),
        "memory_gib": round(total_memory() / 2**30, 1),
        "gpus": [
            {"name": gpu.name, "memory_gib": round(gpu.total_bytes / 2**30, 1), "driver": gpu.driver}
            for gpu in gpus()
        ],
        "torch": version_of("torch"),
        "triton": version_of("triton"),
    }
