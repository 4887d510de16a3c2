"""Storage of file contents, in a folder or an S3 bucket.

A content is named after the id of its file, never after the client's filename. It is written once, never
changed, and not read before it is complete (``chorale.store.files``). Files leave a reserve of their disk
free, so that the response store can still be written if it is on the same disk.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import os
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from datetime import timedelta
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Protocol, TypeVar

from chorale.errors import ChoraleError, ConfigError, install_hint
from chorale.store.database.sqlite import NO_SPACE
from chorale.store.files import FILE_ID

if TYPE_CHECKING:
    from obstore.store import ObjectStore

Result = TypeVar("Result")

PIECE = 2**20  # bytes per read or write
RESERVE = 64 * 2**20  # bytes of a disk that files leave free; an eighth if the disk is small
_PART = 8 * 2**20  # bytes per part of a multipart upload; S3 allows 10,000 parts
_S3 = "s3://"
_PARTIAL = ".partial"
# Environment variables for credentials. Without any, obstore would request them from 169.254.169.254.
_CREDENTIALS = (
    "AWS_ACCESS_KEY_ID", "AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI", "AWS_METADATA_ENDPOINT",
)  # fmt: skip


class ContentsError(ChoraleError, status=503, type="service_unavailable", code="storage_unavailable"):
    """The folder or bucket failed (full, unreachable) and may work later."""

    def __init__(self, message: str, **details: Any) -> None:
        super().__init__(message, **{"retry_after": 5.0, **details})


class MissingContentError(ContentsError, code="content_missing"):
    """The content of a file is missing from the folder or bucket."""


class Contents(Protocol):
    """A storage of contents. Methods raise ``ContentsError``."""

    async def write(self, name: str, pieces: AsyncIterator[bytes]) -> int:
        """Writes a content durably and returns its size. Keeps nothing if that fails or ``pieces`` raises."""
        ...

    def read(self, name: str) -> AsyncGenerator[bytes]:
        """Yields the content in pieces of about ``PIECE`` bytes. Does not read ahead of the consumer, apart
        from network buffers."""
        ...

    async def delete(self, name: str) -> None:
        """Deletes a content, if it exists."""
        ...


def open_contents(location: str) -> Contents:
    """Opens a folder or ``s3://bucket/prefix``, and tries to write there. Blocks.

    Raises ``ConfigError`` if that fails.
    """
    if location.startswith(_S3):
        return ObjectContents(_bucket(location))
    if "://" in location:
        raise ConfigError(f"--batch-storage {location}: give a folder, or s3://BUCKET/PREFIX")
    return FolderContents(Path(location))


def _checked(name: str) -> str:
    if not FILE_ID.fullmatch(name):
        raise ValueError(f"not the id of a file: {name!r}")
    return name


class FolderContents:
    """A folder with one file for each content (mode 0600).

    Until a content is complete, it has a temporary name, and its writer locks it. Opening the folder removes
    unlocked temporary files, which dead processes have left, whether or not the store can be written.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            _remove_partial(folder)
            probe = folder / f".probe-{os.getpid()}"
            os.close(os.open(probe, os.O_WRONLY | os.O_CREAT, 0o600))
            probe.unlink()
        except OSError as error:
            if error.errno not in NO_SPACE:  # without space, only uploads fail
                raise ConfigError(f"--batch-storage {folder}: {error.strerror or error}") from None

    async def write(self, name: str, pieces: AsyncIterator[bytes]) -> int:
        path, partial = self._folder / _checked(name), self._partial(name)
        size = 0
        try:
            with _opened(partial, "wb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                async for piece in joined(pieces):
                    await _in_thread(_write_all, file.fileno(), piece)
                    size += len(piece)
                await _in_thread(os.fsync, file.fileno())
                partial.rename(path)
            await _in_thread(sync_folder, self._folder)
        except OSError as error:
            raise ContentsError(
                f"the folder of files cannot be written: {error.strerror or error}"
            ) from error
        finally:
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)
        return size

    def _partial(self, name: str) -> Path:
        return self._folder / f".{name}{_PARTIAL}"

    async def read(self, name: str) -> AsyncGenerator[bytes]:
        path = self._folder / _checked(name)
        try:
            async with contextlib.aclosing(read_file(path)) as pieces:
                async for piece in pieces:
                    yield piece
        except FileNotFoundError:
            raise MissingContentError(f"the content of {name} is missing") from None
        except OSError as error:
            raise ContentsError(f"the folder of files cannot be read: {error.strerror or error}") from error

    async def delete(self, name: str) -> None:
        try:
            for path in (self._folder / _checked(name), self._partial(name)):
                await asyncio.to_thread(path.unlink, missing_ok=True)
        except OSError as error:
            raise ContentsError(f"a file cannot be deleted: {error.strerror or error}") from error


class ObjectContents:
    """A bucket, accessed through obstore."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    async def write(self, name: str, pieces: AsyncIterator[bytes]) -> int:
        import obstore

        path = _checked(name)
        size = 0
        raised: list[BaseException] = []

        async def counted() -> AsyncIterator[bytes]:
            nonlocal size
            try:
                async for piece in joined(pieces):
                    size += len(piece)
                    yield piece
            except BaseException as error:
                raised.append(error)
                raise

        try:
            # Multipart even for small contents: nothing appears in the bucket before the end.
            await obstore.put_async(
                self._store,
                path,
                counted(),
                use_multipart=True,
                chunk_size=_PART,
                max_concurrency=2,
            )
        except Exception as error:
            if raised:
                raise raised[0] from None
            raise _unavailable("written", error) from error
        return size

    async def read(self, name: str) -> AsyncGenerator[bytes]:
        import obstore

        path = _checked(name)
        try:
            found = await obstore.get_async(self._store, path)
            async for piece in found.stream(min_chunk_size=PIECE):
                yield bytes(piece)
        except FileNotFoundError:
            raise MissingContentError(f"the content of {name} is missing") from None
        except (obstore.exceptions.BaseError, OSError) as error:
            raise _unavailable("read", error) from error

    async def delete(self, name: str) -> None:
        import obstore

        path = _checked(name)
        try:
            await obstore.delete_async(self._store, path)
        except FileNotFoundError:
            return
        except (obstore.exceptions.BaseError, OSError) as error:
            raise _unavailable("changed", error) from error


def _unavailable(what: str, error: Exception) -> ContentsError:
    return ContentsError(f"the bucket of files cannot be {what}: {_first_line(error)}")


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n", 1)[0][:300]


def _bucket(location: str) -> ObjectStore:
    """Opens a bucket with the credentials and the region of the environment (AWS_...).

    Raises ``ConfigError``.
    """
    try:
        import obstore
        from obstore.store import S3Store
    except ImportError:
        raise ConfigError(f"--batch-storage s3://... needs obstore: {install_hint('s3')}") from None
    if not any(map(os.environ.get, _CREDENTIALS)):
        raise ConfigError(f"--batch-storage {location}: no credentials: set one of {', '.join(_CREDENTIALS)}")
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or ""
    try:
        store = S3Store.from_url(
            location,
            client_options={"allow_http": endpoint.startswith("http://")},
            retry_config={"max_retries": 3, "retry_timeout": timedelta(seconds=15)},
        )
        obstore.put(store, ".probe", b"")
        obstore.delete(store, ".probe")
    except (obstore.exceptions.BaseError, OSError, ValueError) as error:
        raise ConfigError(f"--batch-storage {location}: {_first_line(error)}") from None
    return store


async def read_file(path: Path) -> AsyncGenerator[bytes]:
    """Yields the content of a file in pieces of ``PIECE`` bytes. Raises ``OSError``."""
    with _opened(path, "rb") as file:
        while piece := await _in_thread(file.read, PIECE):
            yield piece


async def joined(pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Joins small pieces into pieces of at least ``PIECE`` bytes; only the last may be smaller."""
    pending: list[bytes] = []
    size = 0
    async for piece in pieces:
        pending.append(piece)
        size += len(piece)
        if size >= PIECE:
            yield b"".join(pending)
            pending, size = [], 0
    if pending:
        yield b"".join(pending)


async def _in_thread(call: Callable[..., Result], *arguments: Any) -> Result:
    """Runs a call in a thread. If cancelled, waits for the call, so that its file is still open."""
    running = asyncio.ensure_future(asyncio.to_thread(call, *arguments))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait([running])
        raise


def _opened(path: Path, mode: str) -> IO[bytes]:
    """Opens a file unbuffered. A new file has mode 0600. Blocks."""
    return open(path, mode, 0, opener=lambda name, flags: os.open(name, flags, 0o600))


def _remove_partial(folder: Path) -> None:
    """Removes the incomplete contents that no process has locked."""
    for path in folder.glob(f".*{_PARTIAL}"):
        with contextlib.suppress(OSError), path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()


def _write_all(descriptor: int, data: bytes) -> None:
    """Writes ``data`` to a file. Raises ``OSError`` if that would use the reserve of its disk."""
    disk = os.fstatvfs(descriptor)
    reserve = min(RESERVE, disk.f_blocks * disk.f_frsize // 8)
    if disk.f_bavail * disk.f_frsize < len(data) + reserve:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def sync_folder(folder: Path) -> None:
    """Makes new and changed names in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
