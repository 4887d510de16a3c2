"""The hashes that the hub has published for the files that were downloaded from it."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

_HASH = re.compile(r"[0-9a-f]{64}|[0-9a-f]{40}")  # sha256 of large files, git's sha1 of small ones


def published_hash(path: Path) -> str | None:
    """Returns the hash that the hub named when the file was downloaded, or None if nothing here says it."""
    target = path.resolve()
    if target.parent.name == "blobs" and _HASH.fullmatch(target.name):
        return target.name  # the cache names files by it
    for folder in (path.parent, path.parent.parent):
        place = folder / ".cache" / "huggingface" / "download" / path.relative_to(folder)
        try:
            lines = place.with_name(place.name + ".metadata").read_text("ascii").split()
        except (OSError, ValueError):
            continue
        if len(lines) >= 2 and _HASH.fullmatch(lines[1]):
            return lines[1]
    return None


def has_hash(path: Path, digest: str) -> bool:
    """Returns whether the file's content has the hash. Reads all of it."""
    if len(digest) == 40:  # of a small file
        data = path.read_bytes()
        return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest() == digest
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == digest
