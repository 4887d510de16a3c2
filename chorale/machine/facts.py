"""Properties of this machine, for ``doctor``, ``fit`` and ``collect-env``. Does not import torch."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from dataclasses import dataclass
from pathlib import Path

from chorale.machine import nvidia_smi


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
