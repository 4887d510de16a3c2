"""The contents of files: in a folder, or in an S3 bucket.

A content is named by the id of its file, never by the client's name of it. It is written once and never
changed; until it is complete, nobody reads it (``chorale.store.files``).
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Protocol, TypeVar

from chorale.errors import ChoraleError, ConfigError, install_hint
from chorale.store.files import FILE_ID

if TYPE_CHECKING:
    from obstore.store import ObjectStore

Result = TypeVar("Result")

PIECE = 2**20  # bytes that are read or written at a time
_PART = 8 * 2**20  # of a multipart upload; S3 allows 10,000
_S3 = "s3://"


class ContentsError(ChoraleError, status=503, type="service_unavailable", code="storage_unavailable"):
    """The folder or bucket failed (full, unreachable) and may work later."""

    def __init__(self, message: str, **details: Any) -> None:
        super().__init__(message, **{"retry_after": 5.0, **details})


class MissingContentError(ContentsError, code="content_missing"):
    """The content of a file is not in the folder or bucket, or no longer."""


class Contents(Protocol):
    """Methods raise ``ContentsError``."""

    async def write(self, name: str, pieces: AsyncIterator[bytes]) -> int:
        """Writes a content durably. Returns its size. If ``pieces`` raises, nothing is kept in a bucket."""
        ...

    def read(self, name: str) -> AsyncGenerator[bytes]:
        """Yields the content in pieces of about ``PIECE`` bytes. Nothing is read ahead of the consumer but
        what the network holds."""
        ...

    async def delete(self, name: str) -> None:
        """Deletes a content, if it exists."""
        ...


def open_contents(place: str) -> Contents:
    """Opens a folder or ``s3://bucket/prefix``, and tries to write there. Blocks.

    Raises ``ConfigError`` if that fails.
    """
    if place.startswith(_S3):
        return ObjectContents(_bucket(place))
    if "://" in place:
        raise ConfigError(f"--batch-storage {place}: give a folder, or s3://BUCKET/PREFIX")
    return FolderContents(Path(place))


def _checked(name: str) -> str:
    if not FILE_ID.fullmatch(name):
        raise ValueError(f"not the id of a file: {name!r}")
    return name


class FolderContents:
    """A folder with one file for each content (mode 0600)."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            probe = folder / f".probe-{os.getpid()}"
            os.close(os.open(probe, os.O_WRONLY | os.O_CREAT, 0o600))
            probe.unlink()
        except OSError as error:
            raise ConfigError(f"--batch-storage {folder}: {error.strerror or error}") from None

    async def write(self, name: str, pieces: AsyncIterator[bytes]) -> int:
        path = self._folder / _checked(name)
        size = 0
        try:
            with _opened(path, "wb") as file:
                async for piece in joined(pieces):
                    await _in_thread(_write_all, file.fileno(), piece)
                    size += len(piece)
                await _in_thread(os.fsync, file.fileno())
            await _in_thread(_sync_folder, self._folder)
        except OSError as error:
            raise ContentsError(
                f"the folder of files cannot be written: {error.strerror or error}"
            ) from error
        return size

    async def read(self, name: str) -> AsyncGenerator[bytes]:
        path = self._folder / _checked(name)
        try:
            with _opened(path, "rb") as file:
                while piece := await _in_thread(file.read, PIECE):
                    yield piece
        except FileNotFoundError:
            raise MissingContentError(f"the content of {name} is missing") from None
        except OSError as error:
            raise ContentsError(f"the folder of files cannot be read: {error.strerror or error}") from error

    async def delete(self, name: str) -> None:
        try:
            await asyncio.to_thread((self._folder / _checked(name)).unlink, missing_ok=True)
        except OSError as error:
            raise ContentsError(f"a file cannot be deleted: {error.strerror or error}") from error


class ObjectContents:
    """A bucket, by the library obstore."""

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
            # In parts also if it is small: nothing appears in the bucket before the end.
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


def _bucket(place: str) -> ObjectStore:
    """Opens a bucket with the credentials and the region of the environment (AWS_...).

    Raises ``ConfigError``.
    """
    try:
        import obstore
        from obstore.store import S3Store
    except ImportError:
        raise ConfigError(f"--batch-storage s3://... needs obstore: {install_hint('s3')}") from None
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or ""
    try:
        store = S3Store.from_url(place, client_options={"allow_http": endpoint.startswith("http://")})
        obstore.put(store, ".probe", b"")
        obstore.delete(store, ".probe")
    except (obstore.exceptions.BaseError, OSError, ValueError) as error:
        raise ConfigError(f"--batch-storage {place}: {_first_line(error)}") from None
    return store


async def joined(pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yields small pieces together, and large ones as they are."""
    held: list[bytes] = []
    size = 0
    async for piece in pieces:
        held.append(piece)
        size += len(piece)
        if size >= PIECE:
            yield b"".join(held)
            held, size = [], 0
    if held:
        yield b"".join(held)


async def _in_thread(call: Callable[..., Result], *arguments: Any) -> Result:
    """Runs a call in a thread, and waits for its end if cancelled: its file is closed only then."""
    running = asyncio.ensure_future(asyncio.to_thread(call, *arguments))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait([running])
        raise


def _opened(path: Path, mode: str) -> IO[bytes]:
    """Opens a file without a buffer, of mode 0600 if it is new. Blocks for as long as the folder needs."""
    return open(path, mode, 0, opener=lambda name, flags: os.open(name, flags, 0o600))


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
