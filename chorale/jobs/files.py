"""Input and output of ``run-batch``: local files or URLs (GET for the input, PUT for the output)."""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO
from urllib.parse import urlsplit

import httpx2

from chorale.errors import ChoraleError, ConfigError
from chorale.jobs.contents import sync_folder
from chorale.machine.folders import whole_file

_ATTEMPTS = 5
_DELAY = 2.0  # seconds before the second attempt, doubled each time
_PIECE = 2**20
MAX_DOWNLOAD = 4 * 2**30  # maximum size of an input in bytes


def is_url(name: str) -> bool:
    return urlsplit(name).scheme in ("http", "https")


def shown(name: str) -> str:
    """Returns a file's name, or a URL without its query and user, which may contain secrets."""
    if not is_url(name):
        return name
    parts = urlsplit(name)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def download(url: str, path: Path) -> None:
    """Downloads ``url`` to ``path``. Raises ``ChoraleError``."""

    def once() -> None:
        with httpx2.stream("GET", url, follow_redirects=True, timeout=_timeout()) as response:
            _check(response, f"the input {shown(url)}")
            with path.open("wb") as file:
                for piece in response.iter_bytes(_PIECE):
                    if file.tell() + len(piece) > MAX_DOWNLOAD:
                        raise _RefusedError(f"the input {shown(url)}: larger than {MAX_DOWNLOAD} bytes")
                    file.write(piece)

    _with_retries(once, f"the input {shown(url)}")


def upload(path: Path, url: str) -> None:
    """Uploads a file with PUT. Raises ``ChoraleError``."""

    def once() -> None:
        size = str(path.stat().st_size)
        with path.open("rb") as file:
            headers = {"content-length": size, "content-type": "application/jsonl"}
            pieces = iter(lambda: file.read(_PIECE), b"")
            response = httpx2.put(url, content=pieces, headers=headers, timeout=_timeout())
        _check(response, f"the output {shown(url)}")

    _with_retries(once, f"the output {shown(url)}")


def _timeout() -> httpx2.Timeout:
    return httpx2.Timeout(30.0, read=600.0, write=600.0)


class _RefusedError(ChoraleError):
    """An error that a retry would not change."""


def _check(response: httpx2.Response, what: str) -> None:
    status = response.status_code
    if 200 <= status < 300:
        return
    message = f"{what}: the server responded with HTTP {status}"
    raise ChoraleError(message) if status >= 500 or status in (408, 429) else _RefusedError(message)


def _with_retries(once: Callable[[], None], what: str) -> None:
    for attempt in range(_ATTEMPTS):
        try:
            return once()
        except _RefusedError:
            raise
        except (httpx2.HTTPError, httpx2.InvalidURL, ChoraleError) as error:
            if attempt + 1 == _ATTEMPTS:
                message = error.message if isinstance(error, ChoraleError) else f"{what}: {error}"
                raise ChoraleError(f"{message} ({_ATTEMPTS} attempts)") from None
        time.sleep(_DELAY * 2**attempt)
    raise AssertionError("unreachable")


@dataclass(frozen=True, slots=True)
class Destination:
    """An output file or URL, and the path of its journal until the output is complete."""

    name: str
    journal: Path

    @classmethod
    def of(cls, name: str, temporary: Path | None) -> Destination:
        """The journal of a local file is next to it, the journal of a URL or pipe in ``temporary`` or the
        current folder. Raises ``ConfigError`` if the output or its journal cannot be written.
        """
        path = Path(name)
        local = not is_url(name) and (path.is_file() or not path.exists())
        if not is_url(name) and path.is_dir():
            raise ConfigError(f"--output-file {name}: is a folder")
        folder = path.parent if local else (temporary or Path())
        if not folder.is_dir() or not os.access(folder, os.W_OK):
            raise ConfigError(f"{folder}: not a folder that can be written to")
        if local:
            return cls(name, path.with_name(path.name + ".journal"))
        label = hashlib.sha256(shown(name).encode()).hexdigest()[:16]
        return cls(name, folder / f"run-batch-{label}.journal")

    def deliver(self, write: Callable[[BinaryIO], None]) -> None:
        """Writes the output as a whole; a local file appears only once it is complete."""
        if not is_url(self.name):
            with whole_file(Path(self.name)) as file:
                write(file)
            with contextlib.suppress(OSError):
                sync_folder(Path(self.name).parent)
            return
        made = self.journal.with_name(self.journal.name.removesuffix(".journal") + ".new")
        try:
            with made.open("wb") as file:
                write(file)
            upload(made, self.name)
        finally:
            made.unlink(missing_ok=True)
