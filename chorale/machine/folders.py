"""Temporary folders of running processes, and files that appear when they are complete.

A killed process's folder is removed by the next one.

A folder is locked while its owner runs; the system releases the lock with the process. An unlocked folder is
therefore garbage: ``Folder`` removes these from its parent folder before it creates another.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import stat
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

MAX_SOCKET_PATH_BYTES = 100  # the system's limit is 108 on Linux and 104 on macOS
PREFIX = "chorale-run-"
_NEW = "chorale-new-"  # not locked yet
_NAME = re.compile(rf"({PREFIX}|{_NEW})[a-z0-9_]{{8}}")
_MODES = (0o700, 0o711)  # private, or opened for another user who needs something inside
_NEW_SECONDS = 60.0  # an unlocked folder older than this is abandoned


class Folder:
    """A new folder with mode 0700, until ``remove`` or the end of this process."""

    def __init__(self, parent: str | Path | None = None) -> None:
        """``parent``: default the system's temporary folder. Raises ``OSError`` if it is not writable."""
        where = Path(parent if parent is not None else tempfile.gettempdir())
        sweep(where)
        made = Path(tempfile.mkdtemp(prefix=_NEW, dir=where))  # mkdtemp: mode 0700, and ours
        self._lock: int | None = _locked(made)
        # Renamed once it is locked: another process never sees our name without the lock.
        self.path = made.rename(made.with_name(made.name.replace(_NEW, PREFIX)))

    def remove(self) -> None:
        """Removes the folder and its contents. Idempotent."""
        remove_tree(self.path)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *_: object) -> None:
        self.remove()


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """Opens a file under another name, which becomes ``path`` at the end; after an error nothing is left.

    A pipe or another special file is written to directly. Raises ``OSError`` with the name ``path``.
    """
    target = path.resolve()
    is_special = target.exists() and not target.is_file()
    made = target if is_special else target.with_name(f".{target.name[:200]}.{os.getpid()}.new")
    try:
        with made.open("wb") as file:
            yield file
            if not is_special:
                file.flush()
                os.fsync(file.fileno())
                made.replace(target)
    except OSError as error:
        if error.filename not in (None, str(made)):
            raise
        raise OSError(error.errno, error.strerror, str(path)) from None
    finally:
        if not is_special:
            made.unlink(missing_ok=True)


def write_whole(path: Path, content: bytes | str) -> None:
    """Writes a file in one step (see ``whole_file``). Text is written in UTF-8."""
    with whole_file(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def folder_for_sockets(parents: Iterable[str | None], name: str) -> Folder | None:
    """Returns a new folder in the first of ``parents`` where the path of a socket ``name`` is short enough.

    Skips parents that are empty, missing or not writable. Returns None if none is suitable.
    """
    for parent in parents:
        if not parent or not os.access(parent, os.W_OK):
            continue
        folder = Folder(parent)
        if len(os.fsencode(folder.path.absolute() / name)) < MAX_SOCKET_PATH_BYTES:
            return folder
        folder.remove()
    return None


def sweep(parent: Path) -> None:
    """Removes Chorale's folders in ``parent`` whose owners have ended. Ignores errors."""
    with contextlib.suppress(OSError):
        for path in _candidates(parent):
            lock = _locked(path)
            if lock is not None:
                remove_tree(path)
                os.close(lock)


def remove_tree(path: Path) -> None:
    """Removes a folder and its contents, however deep. Ignores errors.

    A model's program may nest folders deeper than ``shutil.rmtree`` recurses (before Python 3.13).
    """
    try:
        shutil.rmtree(path, ignore_errors=True)
    except RecursionError:
        with contextlib.suppress(OSError):
            _flatten(path)
        shutil.rmtree(path, ignore_errors=True)


def _flatten(path: Path) -> None:
    """Moves every folder within ``path`` to its top, under unused names."""
    folders, name = [path], secrets.token_hex(8)
    for folder in folders:
        with os.scandir(folder) as entries:
            inner = [entry for entry in entries if entry.is_dir(follow_symlinks=False)]
        for entry in inner:
            folders.append(Path(entry.path).rename(path / f"{name}-{len(folders)}"))


def _candidates(parent: Path) -> Iterator[Path]:
    """Yields this user's folders with our names and mode, except those being created."""
    with os.scandir(parent) as entries:
        for entry in entries:
            if not _NAME.fullmatch(entry.name):
                continue
            with contextlib.suppress(OSError):
                status = entry.stat(follow_symlinks=False)
                mine = stat.S_ISDIR(status.st_mode) and stat.S_IMODE(status.st_mode) in _MODES
                if not mine or status.st_uid != os.geteuid():
                    continue
                if entry.name.startswith(PREFIX) or time.time() - status.st_mtime > _NEW_SECONDS:
                    yield Path(entry.path)


def _locked(path: Path) -> int | None:
    """Returns a descriptor with the folder's lock, or None if it is locked or locks are not supported."""
    try:
        import fcntl

        descriptor = os.open(path, os.O_RDONLY)
    except (ImportError, OSError):
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor
