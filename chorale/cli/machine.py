"""Properties of this machine, for ``doctor``, ``fit`` and ``collect-env``. Does not import torch."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Gpu:
    name: str
    total_bytes: int
    free_bytes: int
    driver: str


def gpus() -> list[Gpu]:
    """Returns the NVIDIA GPUs that ``nvidia-smi`` lists, or an empty list."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    query = "--query-gpu=name,memory.total,memory.free,driver_version"
    try:
        done = subprocess.run(
            [tool, query, "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return []
    return [gpu for line in done.stdout.splitlines() if (gpu := _parse_gpu(line)) is not None]


def _parse_gpu(line: str) -> Gpu | None:
    parts = [part.strip() for part in line.split(",")]
    if len(parts) != 4:
        return None
    try:
        return Gpu(parts[0], int(parts[1]) * 2**20, int(parts[2]) * 2**20, parts[3])
    except ValueError:
        return None


def links() -> list[str]:
    """Returns the kinds of links between the GPUs, as ``nvidia-smi topo -m`` names them; empty if unknown."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    try:
        done = subprocess.run([tool, "topo", "-m"], capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return read_links(done.stdout)


def read_links(table: str) -> list[str]:
    """Reads the rows of the GPUs: each has an entry for every GPU, "X" for itself."""
    lines = re.sub(r"\x1b\[[0-9;]*m", "", table).splitlines()
    rows = [line.split() for line in lines if re.match(r"\s*GPU\d+\s", line)]
    rows = [row for row in rows if "X" in row]  # not the heading
    return sorted({entry for row in rows for entry in row[1 : len(rows) + 1] if entry != "X"})


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
