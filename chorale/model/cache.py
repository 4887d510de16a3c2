"""The gpt-oss checkpoints in the hub's cache, one entry per revision. Reads no weights.

The layout is huggingface_hub's: ``models--OWNER--NAME`` with ``refs`` (branch -> commit),
``snapshots/COMMIT`` (links to files), and ``blobs``, where an interrupted download leaves ``*.incomplete``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chorale.model.config import MODEL_TYPES

_PREFIX = "models--"


@dataclass(frozen=True, slots=True)
class CachedModel:
    """``num_bytes``: bytes on this disk; ``total_bytes``: size of the weights according to the index."""

    name: str
    revision: str  # commit; empty if no file is complete
    refs: tuple[str, ...]  # branches and tags that point to the commit
    folder: Path
    num_bytes: int
    total_bytes: int | None
    modified: float  # seconds since 1970
    complete: bool


def cached_models(cache: Path) -> list[CachedModel]:
    """Return all revisions of all gpt-oss repositories in ``cache``, by name; empty if it does not exist."""
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
        files = [path for path in folder.rglob("*") if path.is_file()]  # skips broken links
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
    return kind in MODEL_TYPES if isinstance(kind, str) else "gpt-oss" in name.lower()


def is_complete(folder: Path) -> bool:
    """Returns whether the configuration and all weights that the index names exist."""
    for path in (folder, folder / "original"):
        if not (path / "config.json").is_file():
            continue
        index = _read(path / "model.safetensors.index.json").get("weight_map")
        if isinstance(index, dict) and index:
            return all((path / str(file)).is_file() for file in set(index.values()))
        if any(file.is_file() for file in path.glob("*.safetensors")):
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
