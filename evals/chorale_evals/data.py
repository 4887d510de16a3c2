"""The rows of a published data set, from ``--data DIR`` or from the web.

The package contains no published questions: files are downloaded from their authors, from the hub at pinned
revisions, and checked by SHA-256 where it is known. In ``DIR``, a file has the name at the end of its URL.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import httpx2

from chorale.errors import ConfigError
from chorale.machine.folders import whole_file

MAX_BYTES = 512 * 1024 * 1024
SAMPLE = "sample"  # value of --data that selects the sample questions in this package, SAMPLES
SAMPLES = Path(__file__).with_name("samples")
_MAX_FIELD = 1 << 20  # longest CSV field in characters; the default of csv is 131,072

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Source:
    """A published file. ``sha256`` is None if it is not known."""

    url: str
    sha256: str | None = None

    @property
    def name(self) -> str:
        return PurePosixPath(self.url).name


def load_rows(source: Source, folder: Path | None, columns: Sequence[str]) -> list[Row]:
    """Returns the rows of a source, read from its file in ``folder`` or, with None, from the web.

    Raises ``ConfigError`` if the file is missing or is not the published one, or if a row lacks a column.
    """
    if folder is not None:
        return _read(folder / source.name, columns)
    path = _fetched(source)
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    if source.sha256 not in (None, found):
        raise ConfigError(
            f"{path} is not the published file: its SHA-256 is {found}, not {source.sha256}; remove it"
        )
    return _read(path, columns)


def digest(rows: Sequence[Row]) -> str:
    """Returns a short hash of the rows, to tell whether two runs had the same data."""
    return text_id(json.dumps(rows, sort_keys=True, ensure_ascii=False, default=str))


def unique(ids: Iterable[str]) -> list[str]:
    """Returns the ids in their order; repeated ids get the suffix "-2", "-3" and so on."""
    seen: dict[str, int] = {}
    result = []
    for name in ids:
        seen[name] = seen.get(name, 0) + 1
        result.append(name if seen[name] == 1 else f"{name}-{seen[name]}")
    return result


def text_id(*parts: object) -> str:
    """Returns an id made from texts, such as the question in data sets without ids."""
    return hashlib.sha256("\0".join(map(str, parts)).encode("utf-8", "surrogatepass")).hexdigest()[:16]


def data_folder(task: str, given: str | Path | None) -> Path | None:
    """Returns the data folder of ``task`` for a value of ``--data``, or None to download the data.

    "sample" selects the packaged sample. A subfolder with the task's name takes precedence.
    """
    if given is None:
        return None
    folder = SAMPLES if str(given) == SAMPLE else Path(given).expanduser()
    if not folder.is_dir():
        raise ConfigError(f"--data {given}: no such folder")
    return folder / task if (folder / task).is_dir() else folder


def _read(path: Path, columns: Sequence[str]) -> list[Row]:
    """Reads a file as CSV if its name ends in ".csv", else as JSON lines."""
    content = read_file(path)
    try:
        text = content.decode("utf-8-sig")
        if path.suffix == ".csv":
            csv.field_size_limit(_MAX_FIELD)
            rows = list(csv.DictReader(io.StringIO(text, newline="")))
        else:
            rows = [json.loads(line) for line in text.split("\n") if line.strip()]
    except (ValueError, csv.Error) as fault:
        raise ConfigError(f"{path} cannot be read: {fault}") from fault
    if not rows:
        raise ConfigError(f"{path} has no rows")
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict) or None in row:
            raise ConfigError(f"{path}: row {number} is not an object with the columns of the file")
        if missing := [column for column in columns if row.get(column) is None]:
            has = ", ".join(sorted(map(str, row))[:12])
            raise ConfigError(f"{path}: row {number} has no column {missing[0]!r} (it has {has})")
    return rows


def read_file(path: Path) -> bytes:
    """Returns a file's content. Raises ``ConfigError`` if it is missing or too large."""
    try:
        _check_size(path.stat().st_size, path)
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None


def _check_size(size: int, where: object) -> None:
    if size > MAX_BYTES:
        raise ConfigError(f"{where} has {size:,} bytes; at most {MAX_BYTES:,} are read")


def _fetched(source: Source) -> Path:
    """Returns the path of the file in the cache, and downloads it first if it is missing."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    name = f"{hashlib.sha256(source.url.encode()).hexdigest()[:16]}-{source.name}"
    path = home / "chorale" / "evaluation" / name
    if path.is_file():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with (
            httpx2.stream("GET", source.url, timeout=30.0, follow_redirects=True) as response,
            whole_file(path) as file,
        ):
            response.raise_for_status()
            size = 0
            for chunk in response.iter_bytes():
                size += len(chunk)
                _check_size(size, source.url)
                file.write(chunk)
    except (httpx2.HTTPError, OSError) as fault:
        raise ConfigError(
            f"{source.url} cannot be read ({fault}). If you have the files in a folder, use --data DIR"
        ) from fault
    return path
