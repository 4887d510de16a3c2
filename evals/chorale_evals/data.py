"""The rows of a published data set, from ``--data DIR``, from the hub or from the web.

The package holds no published question: files are read where their authors keep them, at pinned revisions,
and checked by SHA-256 where it is known. ``DIR`` may hold a file under its path in the repository, under its
bare name, or under the short name of the source with any of the endings in ``SUFFIXES``. No torch.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from chorale.errors import ConfigError
from chorale.machine.folders import whole_file
from chorale_evals.tables import SUFFIXES, read_table

MAX_BYTES = 512 * 1024 * 1024
SAMPLE = "sample"  # the value of --data that names the rows of our own making in this package

Row = dict[str, Any]
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class HubFile:
    """A file of a data set repository on the hub. ``name`` is its short name in a folder, such as "test"."""

    repository: str
    path: str
    name: str
    revision: str = "main"
    sha256: str | None = None


@dataclass(frozen=True, slots=True)
class WebFile:
    """A file at a URL, for data that is not on the hub, or gated there."""

    url: str
    name: str
    sha256: str | None = None

    @property
    def path(self) -> str:
        """The last part of the URL."""
        return PurePosixPath(self.url).name


Source = HubFile | WebFile


def load_rows(
    source: Source | Sequence[Source], folder: Path | None = None, *, columns: Iterable[str] = ()
) -> list[Row]:
    """Returns the rows of ``source``; of a sequence, those of the first source that can be read.

    With ``folder``, only files in it are read. Raises ``ConfigError`` if no source can be read, if a file is
    not what was published, or if a row lacks one of ``columns``.
    """
    sources = [source] if isinstance(source, HubFile | WebFile) else list(source)
    if folder is not None:
        return _read(_in_folder(sources, folder), tuple(columns))
    return _first(sources, lambda path: _read(path, tuple(columns)))


def load_file(source: Source | Sequence[Source], folder: Path | None = None) -> Path:
    """Returns the path of ``source``, found as ``load_rows`` finds it."""
    sources = [source] if isinstance(source, HubFile | WebFile) else list(source)
    return _in_folder(sources, folder) if folder is not None else _first(sources, lambda path: path)


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
    """Returns the folder that ``--data`` names for ``task``; None stands for the hub.

    "sample" is the folder of the packaged sample. A subfolder that has the task's name takes precedence.
    """
    if given is None:
        return None
    if str(given) == SAMPLE:
        folder = Path(str(files("chorale_evals") / "samples" / task))
        if not folder.is_dir():
            raise ConfigError(f"there is no packaged sample of {task}")
        return folder
    folder = Path(given).expanduser()
    if not folder.is_dir():
        raise ConfigError(f"--data {given}: no such folder")
    return folder / task if (folder / task).is_dir() else folder


def _read(path: Path, columns: tuple[str, ...]) -> list[Row]:
    rows = read_table(path)
    if not rows:
        raise ConfigError(f"{path} has no rows")
    _check_columns(rows, columns, path)
    return rows


def _check_columns(rows: Sequence[Row], columns: tuple[str, ...], path: Path) -> None:
    for number, row in enumerate(rows, 1):
        missing = [column for column in columns if row.get(column) is None]
        if missing:
            has = ", ".join(sorted(map(str, row))[:12])
            raise ConfigError(f"{path}: row {number} has no column {missing[0]!r} (it has {has})")


def _in_folder(sources: Sequence[Source], folder: Path) -> Path:
    tried: list[str] = []
    for source in sources:
        bare = PurePosixPath(source.path).name
        for name in (source.path, bare, *(source.name + suffix for suffix in SUFFIXES)):
            if name not in tried:
                tried.append(name)
            if (folder / name).is_file():
                _check_size((folder / name).stat().st_size, folder / name)
                return folder / name
    raise ConfigError(f"{folder} has none of these files: {', '.join(tried)}")


def _first(sources: Sequence[Source], use: Callable[[Path], _T]) -> _T:
    """Returns ``use(path)`` of the first source for which nothing fails."""
    faults = []
    for source in sources:
        try:
            path = _from_hub(source) if isinstance(source, HubFile) else _from_web(source)
            _check_digest(path, source.sha256)
            return use(path)
        except ConfigError as fault:
            faults.append(fault.message)
    raise ConfigError("; ".join(faults) + ". With the files in a folder, use --data DIR")


def _check_size(size: int, where: object) -> None:
    if size > MAX_BYTES:
        raise ConfigError(f"{where} has {size:,} bytes; at most {MAX_BYTES:,} are read")


def _check_digest(path: Path, sha256: str | None) -> None:
    _check_size(path.stat().st_size, path)
    if sha256 is None:
        return
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != sha256:
        raise ConfigError(f"{path} is not the published file: its SHA-256 is {found}, not {sha256}")


def _from_hub(source: HubFile) -> Path:
    from huggingface_hub import hf_hub_download

    where = f"{source.path} of the data set {source.repository}"
    try:
        return Path(
            hf_hub_download(source.repository, source.path, repo_type="dataset", revision=source.revision)
        )
    except Exception as fault:
        raise ConfigError(f"{where}: {_explain(fault, source)}") from fault


def _explain(fault: Exception, source: HubFile) -> str:
    """Returns one line about a hub error; the hub's own messages have many."""
    from huggingface_hub import errors

    page = f"https://huggingface.co/datasets/{source.repository}"
    if isinstance(fault, errors.GatedRepoError):
        return f"the data set is gated; accept its terms at {page} and set HF_TOKEN"
    if isinstance(fault, errors.RevisionNotFoundError):
        return f"the hub has no revision {source.revision}"
    if isinstance(fault, errors.RepositoryNotFoundError | errors.RemoteEntryNotFoundError):
        return f"not on the hub ({page})"
    if isinstance(fault, FileNotFoundError):  # the hub's LocalEntryNotFoundError is one
        return "the hub cannot be reached (no network, or HF_HUB_OFFLINE is set)"
    return f"download failed ({str(fault).splitlines()[0] if str(fault) else type(fault).__name__})"


def _from_web(source: WebFile) -> Path:
    """The file in our cache, downloaded if it is not there."""
    import httpx2

    digest = hashlib.sha256(source.url.encode()).hexdigest()[:16]
    path = _cache() / f"{digest}-{source.path}"
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
        raise ConfigError(f"{source.url} cannot be read ({fault})") from fault
    return path


def _cache() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "chorale" / "evaluation"
