"""A program that runs in a mount namespace: a server's store and files on small, full disks.

unshare -Urm python -m tests.support.store.small_disk FOLDER CASE...
"""

from __future__ import annotations

import asyncio
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import httpx2

from chorale.config.engine import ServerConfig
from chorale.store.files import new_file_id
from chorale.store.store import open_store
from tests.api.batches.test_flow import batched, ended, line, upload
from tests.api.batches.test_uploads import END, HEAD, PURPOSE, part
from tests.support.event_loop import run
from tests.support.responses import serve
from tests.support.server import Server

HELLO = "<|channel|>final<|message|>Hello.<|return|>"


FULL_UPLOAD = 30 * 2**20  # more than the disk has


def mount(folder: Path, megabytes: int) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", folder], check=True)


def config(folder: Path) -> ServerConfig:
    return ServerConfig(system_start_date="2026-01-02", response_store=str(folder / "r.sqlite3"))


def files_of(folder: Path) -> list[Path]:
    return list((folder / "store.sqlite3.files").iterdir())


async def full_from_the_start(folder: Path) -> None:
    """The disk is full before the store's file exists."""
    fill(folder)
    await check_not_storing(folder, "ballast")


def fill(folder: Path) -> None:
    with (folder / "ballast").open("wb", buffering=0) as ballast:
        try:
            while True:
                ballast.write(b"x" * 4096)
        except OSError:
            pass


async def full_after_a_crash(folder: Path) -> None:
    """A dead process left a response in the store, then the disk fills up."""
    subprocess.run(
        [sys.executable, "-m", "tests.support.store.crashing_writer", folder / "r.sqlite3"], check=False
    )
    fill(folder)
    await check_not_storing(folder, "ballast")


async def uploads(folder: Path) -> None:
    """An upload larger than the disk fails, and the next ones succeed."""
    async with batched(folder) as server:
        for _ in range(3):
            answer = await post(server, FULL_UPLOAD)
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "storage_unavailable")
            assert "retry-after" in answer.headers
            assert files_of(folder) == []
            assert (await server.post(input="a"))[1]["store"] is True
        made = await post(server, 2**20)
        assert made.status_code == 200
        assert [path.name for path in files_of(folder)] == [made.json()["id"]]


async def killed(folder: Path) -> None:
    """Files left by a dead process are removed at the start, although the store cannot be written."""
    async with batched(folder) as server:
        assert (await post(server, 10)).status_code == 200
    left = folder / "store.sqlite3.files" / f".{new_file_id()}.partial"
    left.write_bytes(b"x" * 10 * 2**20)
    fill(folder)
    async with batched(folder) as server:
        assert not left.exists()
        await asyncio.sleep(1.1)  # between attempts to open the store
        assert (await post(server, 2**20)).status_code == 200


async def a_batch_waits(folder: Path) -> None:
    """A batch waits, and writes its output once there is space."""
    async with batched(folder) as server:
        file = await upload(server, line(1))
        ballast = folder / "ballast"
        ballast.write_bytes(b"x" * 22 * 2**20)  # leaves less space than the reserve
        batch = await server.sdk.batches.create(
            input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
        )
        await asyncio.sleep(3)
        found = await server.sdk.batches.retrieve(batch.id)
        assert found.status == "finalizing", found
        assert len(files_of(folder)) == 1
        ballast.unlink()
        async with asyncio.timeout(30):
            assert (await ended(server, found)).output_file_id is not None
        assert len(files_of(folder)) == 2


async def post(server: Server, size: int) -> httpx2.Response:
    content = PURPOSE + part("file", b"{}" + b" " * size, '; filename="a"') + END
    return await server.http.post("/v1/files", content=content, headers=HEAD)


async def read_only(folder: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", folder], check=True)
    await check_not_storing(folder, None)


async def check_not_storing(folder: Path, ballast: str | None) -> None:
    chosen = config(folder)
    async with serve(HELLO, store=open_store(chosen), config=chosen) as server:
        assert server.store.fault is not None
        status, body = await server.post(input="a")
        assert (status, body["status"], body["store"]) == (200, "completed", False), body
        for path, asked in (("/v1/responses", {"input": "a", "background": True}), ("/v1/conversations", {})):
            refused = await server.http.post(path, json=asked)
            assert refused.status_code == 503, refused.text
            assert "retry-after" in refused.headers
        if ballast is None:
            return
        os.unlink(folder / ballast)
        await asyncio.sleep(1.1)  # between attempts to open the file
        status, body = await server.post(input="a")
        assert body["store"] is True, server.store.fault
        assert server.store.fault is None
        assert (await server.http.get(f"/v1/responses/{body['id']}")).status_code == 200


CASES: dict[str, tuple[int, Callable[[Path], Coroutine[Any, Any, None]]]] = {
    "new": (1, full_from_the_start), "crash": (1, full_after_a_crash), "ro": (1, read_only),
    "upload": (24, uploads), "killed": (24, killed), "batch": (24, a_batch_waits),
}  # fmt: skip

if __name__ == "__main__":
    logging.basicConfig(format="LOG %(levelname)s %(message)s")
    for name in sys.argv[2:]:
        print(f"LOG case {name}", file=sys.stderr, flush=True)
        megabytes, case = CASES[name]
        disk = Path(sys.argv[1], name)
        disk.mkdir()
        mount(disk, megabytes)
        run(case(disk))
    print("held")
