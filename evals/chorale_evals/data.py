"""The rows of a published data set, from ``--data DIR``, from the hub or from the web.

The package holds no published question: files are read where their authors keep them, from the hub at pinned
revisions, and checked by SHA-256 where it is known. ``DIR`` has a file under its bare name. No torch.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path, PurePosixPath
from typing import Any

import httpx2

from chorale.errors import ConfigError
from chorale.machine.folders import whole_file

MAX_BYTES = 512 * 1024 * 1024
SAMPLE = "sample"  # the value of --data that names the rows of our own making in this package
_MAX_FIELD = 1 << 20  # characters of a CSV field; the module's own limit is 131,072

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class HubFile:
    """A file of a data set repository on the hub."""

    repository: str
    path: str
    revision: str
    sha256: str | None = None


@dataclass(frozen=True, slots=True)
class WebFile:
    """A file at a URL, for data that is not on the hub, or gated there."""

    path: str
    sha256: str | None = None


Source = HubFile | WebFile


def load_rows(sources: Sequence[Source], folder: Path | None, columns: Iterable[str]) -> list[Row]:
    """Returns the rows of the first source that can be read; with ``folder``, of a file in it only.

    Raises ``ConfigError`` if there is none, if a file is not what was published, or if a row lacks a column.
    """
    faults = []
    for source in sources:
        try:
            path = _in_folder(source, folder) if folder else _fetched(source)
            _check(path, None if folder else source.sha256)
            return _read(path, tuple(columns))
        except ConfigError as fault:
            faults.append(fault.message)
            if folder and (folder / _name(source)).exists():
                break
    raise ConfigError("; ".join(faults) + ("" if folder else ". With the files in a folder, use --data DIR"))


def digest(rows: Sequence[Row]) -> str:
    """Returns a short hash of the rows, which says if two runs had the same data."""
    text = json.dumps(rows, sort_keys=True, ensure_ascii=False, default=str)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def unique(ids: Iterable[str]) -> list[str]:
    """Returns ids in their order, with "-2" and so on appended to those that occurred before."""
    seen: dict[str, int] = {}
    result = []
    for name in ids:
        seen[name] = seen.get(name, 0) + 1
        result.append(name if seen[name] == 1 else f"{name}-{seen[name]}")
    return result


def text_id(*parts: object) -> str:
    """Returns an id made from a question's text, for data sets without ids."""
    return hashlib.sha256("\0".join(map(str, parts)).encode("utf-8", "surrogatepass")).hexdigest()[:16]


def data_folder(task: str, given: str | Path | None) -> Path | None:
    """Returns the folder that ``--data`` names for ``task``; None stands for the hub and the web.

    "sample" is the folder of the packaged sample. A subfolder that has the task's name takes precedence.
    """
    if given is None:
        return None
    folder = (
        Path(str(files("chorale_evals") / "samples")) if str(given) == SAMPLE else Path(given).expanduser()
    )
    if not folder.is_dir():
        raise ConfigError(f"--data {given}: no such folder")
    return folder / task if (folder / task).is_dir() else folder


def _name(source: Source) -> str:
    return PurePosixPath(source.path).name


def _in_folder(source: Source, folder: Path) -> Path:
    path = folder / _name(source)
    if not path.is_file():
        raise ConfigError(f"{folder} has no file {path.name}")
    return path


def _check(path: Path, sha256: str | None) -> None:
    _check_size(path.stat().st_size, path)
    if sha256 is not None and (found := hashlib.sha256(path.read_bytes()).hexdigest()) != sha256:
        raise ConfigError(f"{path} is not the published file: its SHA-256 is {found}, not {sha256}")


def _check_size(size: int, where: object) -> None:
    if size > MAX_BYTES:
        raise ConfigError(f"{where} has {size:,} bytes; at most {MAX_BYTES:,} are read")


def _read(path: Path, columns: tuple[str, ...]) -> list[Row]:
    """Reads a CSV file or JSON lines, by the ending."""
    try:
        text = path.read_bytes().decode("utf-8-sig")
        if path.suffix == ".csv":
            csv.field_size_limit(_MAX_FIELD)
            rows = list(csv.DictReader(io.StringIO(text, newline="")))
        else:
            rows = [json.loads(line) for line in text.split("\n") if line.strip()]
    except (OSError, ValueError, csv.Error) as fault:
        raise ConfigError(f"{path} cannot be read: {fault}") from fault
    if not rows:
        raise ConfigError(f"{path} has no rows")
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict) or None in row:
            raise ConfigError(f"{path}: row {number} is not an object of the columns")
        if missing := [column for column in columns if row.get(column) is None]:
            has = ", ".join(sorted(map(str, row))[:12])
            raise ConfigError(f"{path}: row {number} has no column {missing[0]!r} (it has {has})")
    return rows


def _fetched(source: Source) -> Path:
    return _from_hub(source) if isinstance(source, HubFile) else _from_web(source)


def _from_hub(source: HubFile) -> Path:
    from huggingface_hub import errors, hf_hub_download

    page = f"https://huggingface.co/datasets/{source.repository}"
    try:
        return Path(
            hf_hub_download(source.repository, source.path, repo_type="dataset", revision=source.revision)
        )
    except errors.GatedRepoError as fault:
        raise ConfigError(f"the data set is gated; accept its terms at {page} and set HF_TOKEN") from fault
    except Exception as fault:  # the hub's errors have many lines, and many types
        said = str(fault).partition("\n")[0] or type(fault).__name__
        raise ConfigError(f"{source.path} of {page} cannot be had ({said})") from fault


def _from_web(source: WebFile) -> Path:
    """The file in our cache, downloaded if it is not there."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    name = f"{hashlib.sha256(source.path.encode()).hexdigest()[:16]}-{_name(source)}"
    path = home / "chorale" / "evaluation" / name
    if path.is_file():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with (
            httpx2.stream("GET", source.path, timeout=30.0, follow_redirects=True) as response,
            whole_file(path) as file,
        ):
            response.raise_for_status()
            size = 0
            for chunk in response.iter_bytes():
                size += len(chunk)
                _check_size(size, source.path)
                file.write(chunk)
    except (httpx2.HTTPError, OSError) as fault:
        raise ConfigError(f"{source.path} cannot be read ({fault})") from fault
    return path
