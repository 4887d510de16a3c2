"""Marker: a note in Triton's disk cache that all kernels of a kind of start are there, so none is sought.

It goes when the cache is wiped, lists the kernels that it speaks for, and is worth nothing without one of
them. What decides which kernels a start needs is hashed into its name.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path

import torch
import triton
from triton.runtime.cache import get_cache_manager

from chorale.kernels.triton.precompile.pool import MARKERS

Kernel = tuple[str, str]  # its hash, by which Triton's cache has it, and its file's name there
_SOURCES = Path(__file__).parents[3]
_ROOMS = ("kernels", "model", "runtime", "serve")  # whose code decides which kernels are launched, and how


class Marker:
    """``facts``: what the caller knows of this start that kernels depend on."""

    def __init__(self, facts: str) -> None:
        told = "\n".join((facts, *_surroundings(), _source_hash()))
        self._key = hashlib.sha256(told.encode()).hexdigest()
        self._file = f"{self._key}.json"

    def is_valid(self) -> bool:
        """Whether it was written whole, and all of its kernels are still there."""
        try:
            path = get_cache_manager(MARKERS).get_file(self._file)
            if path is None:
                return False
            found = json.loads(Path(path).read_text("utf-8"))
            kernels = found["kernels"]
            return found["key"] == self._key and bool(kernels) and all(_is_there(*one) for one in kernels)
        except (OSError, ValueError, KeyError, TypeError):
            return False

    def write(self, kernels: Iterable[Kernel]) -> None:
        """Raises ``OSError``. The file appears whole or not at all."""
        told = json.dumps({"key": self._key, "kernels": sorted(kernels)})
        get_cache_manager(MARKERS).put(told, self._file, binary=False)


def is_cached(key: str, name: str) -> bool:
    """Whether Triton's disk cache has the kernel that its compiler calls ``name``, under Triton's ``key``."""
    return _is_there(hashlib.sha256(key.encode()).hexdigest(), name)


def _is_there(hash_: str, name: str) -> bool:
    return get_cache_manager(hash_).get_file(f"__grp__{name[:150]}.json") is not None


def _surroundings() -> list[str]:
    """Of the machine and of what is installed."""
    target = triton.runtime.driver.active.get_current_target()
    settings = sorted(item for item in os.environ.items() if item[0].startswith(("TRITON_", "PTXAS_")))
    kept = [item for item in settings if item[0] not in ("TRITON_CACHE_DIR", "TRITON_HOME")]
    found = [triton.__version__, torch.__version__, repr(target), repr(kept)]
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        found.append(f"{properties.name}, {properties.multi_processor_count}")
    return found


def _source_hash() -> str:
    """Of the contents, not of times: an installation that was copied is the same."""
    total = hashlib.sha256()
    for room in _ROOMS:
        for path in sorted((_SOURCES / room).rglob("*.py")):
            total.update(f"{path.relative_to(_SOURCES)}\n".encode())
            total.update(hashlib.sha256(path.read_bytes()).digest())
    return total.hexdigest()
