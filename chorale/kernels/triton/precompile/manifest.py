"""CompileManifest: a file in Triton's disk cache which states that all kernels of a configuration are
compiled.

It lists the kernels and is invalid if one is missing; its name is a hash of everything that determines the
kernels of a start. A start that finds it skips the dry run.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch
import triton
from triton.runtime.cache import get_cache_manager

from chorale.kernels.triton.launch import architecture_of
from chorale.kernels.triton.precompile.pool import MANIFESTS

Kernel = tuple[str, str]  # hash in Triton's cache, and name of its file there
_PLACES = ("TRITON_CACHE_DIR", "TRITON_HOME", "TRITON_LIBCUDA_PATH")  # settings that change no kernel


class CompileManifest:
    """``facts``: further facts on which kernels depend, from the caller; ``roots``: folders of sources."""

    def __init__(self, facts: str, device: torch.device, roots: Sequence[Path]) -> None:
        parts = "\n".join((facts, *_surroundings(device), *_sources(roots)))
        self._key = hashlib.sha256(parts.encode()).hexdigest()
        self._file = f"{self._key}.json"

    def is_valid(self) -> bool:
        """Returns whether the file exists, is complete, and all its kernels exist."""
        try:
            path = get_cache_manager(MANIFESTS).get_file(self._file)
            if path is None:
                return False
            found = json.loads(Path(path).read_text("utf-8"))
            kernels = found["kernels"]
            return found["key"] == self._key and bool(kernels) and all(_exists(*one) for one in kernels)
        except (OSError, ValueError, KeyError, TypeError):
            return False

    def write(self, kernels: Iterable[Kernel]) -> None:
        """Write the file atomically. Raises ``OSError``."""
        content = json.dumps({"key": self._key, "kernels": sorted(kernels)})
        get_cache_manager(MANIFESTS).put(content, self._file, binary=False)


def is_cached(key: str, name: str) -> bool:
    """Returns whether Triton's disk cache has the kernel ``name`` under Triton's ``key``."""
    return _exists(hashlib.sha256(key.encode()).hexdigest(), name)


def _exists(hash_: str, name: str) -> bool:
    return get_cache_manager(hash_).get_file(f"__grp__{name[:150]}.json") is not None


def _surroundings(device: torch.device) -> list[str]:
    """Return the GPU, the installed versions, and Triton's settings. Builds of torch are not
    distinguished."""
    settings = sorted(item for item in os.environ.items() if item[0].startswith(("TRITON_", "PTXAS_")))
    kept = [item for item in settings if item[0] not in _PLACES]
    versions = [triton.__version__, torch.__version__.partition("+")[0]]
    return [*versions, repr(architecture_of(device)), repr(kept)]


def _sources(roots: Sequence[Path]) -> Iterator[str]:
    """Return names and hashes of the sources, without times, so that a copied installation is equal."""
    for root in roots:
        for path in sorted(root.rglob("*.py")):
            yield f"{path.relative_to(root.parent)} {hashlib.sha256(path.read_bytes()).hexdigest()}"
