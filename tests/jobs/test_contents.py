"""Contents of files in a folder, in obstore's memory store, and in moto's S3 server if it is installed."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from chorale.errors import ConfigError
from chorale.jobs.contents import (
    PIECE,
    Contents,
    ContentsError,
    FolderContents,
    MissingContentError,
    ObjectContents,
    open_contents,
)
from chorale.store.files import new_file_id
from tests.support.store.s3 import bucket


async def pieces(*chunks: bytes, error: Exception | None = None) -> AsyncIterator[bytes]:
    for chunk in chunks:
        yield chunk
    if error is not None:
        raise error


async def whole(contents: Contents, name: str) -> bytes:
    return b"".join([piece async for piece in contents.read(name)])


@pytest.fixture(params=["folder", "memory", "s3"])
def contents(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Contents]:
    if request.param == "folder":
        yield FolderContents(tmp_path / "files")
    elif request.param == "memory":
        yield ObjectContents(pytest.importorskip("obstore.store").MemoryStore())
    else:
        pytest.importorskip("obstore")
        with bucket(monkeypatch) as location:
            yield open_contents(location)


async def test_a_content_is_read_as_written(contents: Contents) -> None:
    large = os.urandom(PIECE + 17)
    for chunks in ((), (b"",), (b"a", b"b" * 70_000), (large[:5], large, large), (b"x" * 1000,) * 9000):
        name = new_file_id()
        assert await contents.write(name, pieces(*chunks)) == sum(map(len, chunks))
        assert await whole(contents, name) == b"".join(chunks)
        await contents.delete(name)
        await contents.delete(name)
        with pytest.raises(MissingContentError):
            await whole(contents, name)


async def test_an_error_of_the_source_is_raised_unchanged(contents: Contents) -> None:
    with pytest.raises(KeyError):
        await contents.write(new_file_id(), pieces(b"x" * (9 * 2**20), error=KeyError("source")))


async def test_only_file_ids_are_accepted_as_names(contents: Contents) -> None:
    for name in ("../x", "file-1", "/etc/passwd", f"{new_file_id()}/.."):
        for call in (contents.write(name, pieces(b"")), whole(contents, name), contents.delete(name)):
            with pytest.raises(ValueError, match="not the id"):
                await call


def test_a_folder_is_private_and_a_full_disk_is_a_contents_error(tmp_path: Path) -> None:
    folder = tmp_path / "files"
    contents, name = FolderContents(folder), new_file_id()
    asyncio.run(contents.write(name, pieces(b"secret")))
    assert folder.stat().st_mode & 0o777 == 0o700
    assert (folder / name).stat().st_mode & 0o777 == 0o600
    if Path("/dev/full").exists():
        (folder / name).unlink()
        (folder / f".{name}.partial").symlink_to("/dev/full")
        with pytest.raises(ContentsError, match="No space left"):
            asyncio.run(contents.write(name, pieces(b"x")))
        assert list(folder.iterdir()) == []


async def test_unlocked_partial_files_are_removed_and_locked_ones_are_kept(tmp_path: Path) -> None:
    contents, name = FolderContents(tmp_path), new_file_id()
    (tmp_path / f".{new_file_id()}.partial").write_bytes(b"left")
    begun, may_end = asyncio.Event(), asyncio.Event()

    async def slow() -> AsyncIterator[bytes]:
        yield b"x" * PIECE
        begun.set()
        await may_end.wait()
        yield b"y"

    writing = asyncio.create_task(contents.write(name, slow()))
    await begun.wait()
    FolderContents(tmp_path)  # another server opens the folder
    assert [path.name for path in tmp_path.iterdir()] == [f".{name}.partial"]
    may_end.set()
    assert await writing == PIECE + 1
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_missing_credentials_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("obstore")
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    with pytest.raises(ConfigError, match="AWS_ACCESS_KEY_ID"):
        open_contents("s3://bucket/prefix")


def test_unusable_locations_are_refused(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    for location in (str(tmp_path / "taken"), str(tmp_path / "taken" / "x"), "gs://bucket"):
        with pytest.raises(ConfigError, match="--batch-storage"):
            open_contents(location)
