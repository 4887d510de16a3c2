"""``python -m chorale.kernels.triton.precompile.worker_main FD ...``: compile into Triton's disk cache.

The parent's side is ``pool.py``. The kernels are imported once; then a process is forked for each socket. No
process opens a device: each task contains the target.
"""

from __future__ import annotations

import contextlib
import enum
import importlib
import io
import os
import pickle
import pkgutil
import signal
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import triton
from triton.backends.nvidia import driver as nvidia
from triton.runtime.cache import triton_key
from triton.runtime.jit import JITFunction

from chorale.kernels import triton as package


class _Pickler(pickle.Pickler):
    """Sends kernels by name: both sides have the same sources."""

    def reducer_override(self, found: Any) -> Any:
        if isinstance(found, JITFunction):
            return _find, (found.fn.__module__, found.fn.__qualname__)
        if isinstance(found, enum.Enum):  # Python 3.11.0 to 3.11.3 would name ``getattr``
            return type(found), (found.value,)
        return NotImplemented


class _Unpickler(pickle.Unpickler):
    """Accepts only the parts of a task: kernels by name, Triton's types, and plain values."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == (f"{package.__name__}.precompile.worker_main", "_find"):
            return _find  # this process runs the module as a script; importing it would make a second copy
        if module.partition(".")[0] == "triton":
            found = super().find_class(module, name)
            if isinstance(found, type):
                return found
        elif module == "builtins" and name in ("set", "frozenset", "complex", "slice"):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} is not part of a task")


def _find(module: str, name: str) -> Any:
    """Returns the kernel of that name. Raises ``UnpicklingError`` for anything else."""
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    if not isinstance(found, JITFunction):
        raise pickle.UnpicklingError(f"{module}.{name} is not a kernel")
    return found


def describe(source: Any, target: Any, options: dict[str, Any], env_vars: dict[str, str]) -> bytes:
    """Returns a task: the arguments of ``triton.compile``. Raises whatever pickle raises."""
    buffer = io.BytesIO()
    _Pickler(buffer).dump((source, target, options, env_vars))
    return buffer.getvalue()


def perform(task: bytes) -> None:
    """Put a task's kernel and its launcher into Triton's disk cache. Raises what the compiler raises."""
    source, target, options, env_vars = _Unpickler(io.BytesIO(task)).load()
    prepare_launcher(triton.compile(source, target=target, options=options, _env_vars=env_vars))


def prepare_launcher(kernel: Any) -> None:
    """Compile the C code with which Triton 3.6 launches kernels of a signature, because gcc takes long.

    Best effort: a launch compiles a missing launcher, and raises the error of a failed one.
    """
    if kernel.metadata.target.backend == "cuda" and hasattr(nvidia, "make_launcher"):
        with contextlib.suppress(Exception):
            nvidia.CudaLauncher(kernel.src, kernel.metadata)


def settle_keys() -> None:
    """Let Triton compute the keys of all kernels in a fixed order, callees first.

    In Triton 3.6 a kernel's key depends on whether the key of a kernel with the same callees was computed
    before: only then it includes the callees' constants. Two processes, or starts with and without a dry run,
    would use two keys for one kernel. Also hashes all of Triton, which takes most of a second.
    """
    triton_key()
    for found in sorted(
        pkgutil.walk_packages(package.__path__, f"{package.__name__}."), key=lambda one: one.name
    ):
        with contextlib.suppress(ImportError):
            module = importlib.import_module(found.name)
            for value in vars(module).values():  # in the order of their definition
                if isinstance(value, JITFunction):
                    _ = value.cache_key


def serve(parent: Connection, perform: Callable[[bytes], None] = perform) -> None:
    """Answer tasks until the parent closes the socket: with an empty message, or with the error."""
    with contextlib.suppress(EOFError, OSError):
        while True:
            task = parent.recv_bytes()
            try:
                perform(task)
                answer = b""
            except Exception as error:
                answer = f"{type(error).__name__}: {error}".encode()[:2000] or b"?"
            parent.send_bytes(answer)


def main(sockets: list[int]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the supervisor handles a terminal's Ctrl-C
    with contextlib.suppress(Exception):
        nvidia.CudaUtils()  # also compiles C code; opens no device
    settle_keys()
    children = []
    for mine in sockets:
        child = os.fork()
        if not child:
            for other in sockets:
                if other != mine:
                    os.close(other)  # so that the parent notices when its owner ends
            serve(Connection(mine))
            os._exit(0)
        children.append(child)
    for socket in sockets:
        os.close(socket)
    for child in children:
        os.waitpid(child, 0)


if __name__ == "__main__":
    main([int(number) for number in sys.argv[1:]])
