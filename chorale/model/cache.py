"""The hub's cache: the gpt-oss checkpoints in it, one entry per revision, and whose turn it is to fetch one.

The layout is huggingface_hub's: ``models--OWNER--NAME`` with ``refs`` (branch -> commit),
``snapshots/COMMIT`` (links to files), and ``blobs``, where a broken download leaves ``*.incomplete``.

huggingface_hub locks its files with flock, which some network file systems keep to one machine: two pods that
start together would fetch the same weights into one volume. A lease needs only that a file is created once.
Its holder counts in it, and another process takes it over when the count stands still. If two take it over
within the same milliseconds, both download: a waste, no fault, since files are renamed into place.
"""

from __future__ import annotations

import json
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_PREFIX = "models--"
BEAT = 5.0  # seconds between counts
LIMIT = 60.0  # without a count: as long as NFS may keep attributes of a file; starved holders need some, too
POLL = 1.0


@dataclass(frozen=True, slots=True)
class CachedModel:
    """``num_bytes`` are on this disk; ``total_bytes`` of the weights, where the index says it."""

    name: str
    revision: str  # commit; empty if no file is complete
    refs: tuple[str, ...]  # branches and tags that point there
    folder: Path
    num_bytes: int
    total_bytes: int | None
    modified: float  # seconds since 1970
    complete: bool


def cached_models(cache: Path) -> list[CachedModel]:
    """All revisions of all gpt-oss repositories in ``cache``, by name; none if there is no such folder."""
    if not cache.is_dir():
        return []
    repositories = sorted(path for path in cache.iterdir() if path.name.startswith(_PREFIX) and path.is_dir())
    return [found for path in repositories for found in _revisions(path)]


def _revisions(repository: Path) -> Iterator[CachedModel]:
    name = repository.name.removeprefix(_PREFIX).replace("--", "/")
    refs = _refs(repository / "refs")
    partial = sum(path.stat().st_size for path in repository.glob("blobs/*.incomplete"))
    snapshots = sorted(path for path in repository.glob("snapshots/*") if path.is_dir())
    for folder in snapshots:
        if not _is_gpt_oss(folder, name):
            continue
        files = [path for path in folder.rglob("*") if path.is_file()]  # a link to nothing is no file
        complete = is_complete(folder)
        yield CachedModel(
            name,
            folder.name,
            tuple(sorted(ref for ref, commit in refs.items() if commit == folder.name)),
            folder,
            sum(path.stat().st_size for path in files) + (0 if complete else partial),
            _total(folder),
            max((path.stat().st_mtime for path in files), default=folder.stat().st_mtime),
            complete,
        )
    if not snapshots and partial and "gpt-oss" in name.lower():
        yield CachedModel(name, "", (), repository, partial, None, repository.stat().st_mtime, False)


def _refs(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): path.read_text("ascii", "replace").strip()
        for path in folder.rglob("*")
        if path.is_file()
    }


def _is_gpt_oss(folder: Path, name: str) -> bool:
    config = _read(folder / "config.json") or _read(folder / "original" / "config.json")
    kind = config.get("model_type")
    return kind == "gpt_oss" if isinstance(kind, str) else "gpt-oss" in name.lower()


def is_complete(folder: Path) -> bool:
    """Returns whether the configuration and all weights that the index names exist."""
    for place in (folder, folder / "original"):
        if not (place / "config.json").is_file():
            continue
        index = _read(place / "model.safetensors.index.json").get("weight_map")
        if isinstance(index, dict) and index:
            return all((place / str(file)).is_file() for file in set(index.values()))
        if any(path.is_file() for path in place.glob("*.safetensors")):
            return True
    return False


def _total(folder: Path) -> int | None:
    metadata = _read(folder / "model.safetensors.index.json").get("metadata")
    size = metadata.get("total_size") if isinstance(metadata, dict) else None
    return size if isinstance(size, int) else None


def _read(path: Path) -> dict[str, Any]:
    """Return the file's JSON object, or an empty one if there is none."""
    try:
        found = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


@contextmanager
def lease(path: Path, waits: Callable[[], None]) -> Iterator[None]:
    """Holds the lease, if the folder can be written. ``waits`` is called each second until then."""
    token, done = uuid.uuid4().hex, threading.Event()
    if not _taken(path, token, waits):
        yield
        return
    beats = threading.Thread(target=_beat, args=(path, token, done), name="lease", daemon=True)
    beats.start()
    try:
        yield
    finally:
        done.set()
        beats.join()
        if _content(path).startswith(token):
            path.unlink(missing_ok=True)


def _taken(path: Path, token: str, waits: Callable[[], None]) -> bool:
    seen, since = "", time.monotonic()
    with suppress(OSError, ValueError):
        path.parent.mkdir(parents=True, exist_ok=True)
    while True:
        try:
            with path.open("x") as file:
                file.write(token)
            return True
        except FileExistsError:
            found = _content(path)
        except (OSError, ValueError):  # a volume that is only read; no name of a file
            return False
        if found != seen:
            seen, since = found, time.monotonic()
        elif time.monotonic() - since > LIMIT:
            path.unlink(missing_ok=True)
            continue
        waits()
        time.sleep(POLL)


def _beat(path: Path, token: str, done: threading.Event) -> None:
    count = 0
    # Another process has it when this one stood still for too long.
    while not done.wait(BEAT) and (_content(path) or token).startswith(token):
        count += 1
        with suppress(OSError):  # a full disk, for which the download itself has an error
            path.write_text(f"{token} {count}")


def _content(path: Path) -> str:
    """Returns the content, empty if there is none. Opening a file makes NFS ask for what is new."""
    try:
        return path.read_text()
    except OSError:
        return ""
