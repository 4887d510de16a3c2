"""Compilation for a GPU that need not be in this machine."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget

from chorale.kernels.triton.tuning import wave_size

_LIBCUDA, _LIBCUDA_PATH = "libcuda.so.1", "TRITON_LIBCUDA_PATH"
_FOLDER = "chorale-libcuda-"


@dataclass(frozen=True, slots=True)
class TargetDriver:
    """The part of Triton's driver that a compile-only launch needs."""

    architecture: str  # "sm_90" or "gfx942"
    multiprocessors: int

    def get_current_target(self) -> GPUTarget:
        if self.architecture.startswith("sm_"):
            return GPUTarget("cuda", int(self.architecture.removeprefix("sm_")), 32)
        return GPUTarget("hip", self.architecture, wave_size(self.architecture))

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _: int) -> int:
        return 0


@contextmanager
def compiled_for(architecture: str, multiprocessors: int) -> Iterator[None]:
    """Compile launches on meta tensors for this GPU. Only one GPU per process, because Triton caches its
    properties.

    Without a driver, Triton's C code is linked with an empty library instead.
    """
    triton.runtime.driver.set_active(TargetDriver(architecture, multiprocessors))
    with tempfile.TemporaryDirectory(prefix=_FOLDER) as folder:
        if _LIBCUDA_PATH not in os.environ and not _has_driver() and _make_library(Path(folder, _LIBCUDA)):
            os.environ[_LIBCUDA_PATH] = folder
        try:
            yield
        finally:
            if os.environ.get(_LIBCUDA_PATH) == folder:
                del os.environ[_LIBCUDA_PATH]


def links_without_driver() -> bool:
    """Returns whether the compiled C code cannot be loaded on this machine."""
    return _FOLDER in os.environ.get(_LIBCUDA_PATH, "")


def _has_driver() -> bool:
    try:
        ctypes.CDLL(_LIBCUDA)
    except OSError:
        return False
    return True


def _make_library(path: Path) -> bool:
    """Make an empty ``libcuda.so.1``. Returns False without a C compiler, which Triton would need too."""
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        return False
    command = [compiler, "-shared", f"-Wl,-soname,{_LIBCUDA}", "-o", str(path), "-x", "c", os.devnull]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0
