"""Run as a program inside a mount namespace: a server's store on a disk of one megabyte that is full.

unshare -Urm python -m tests.support.small_disk new|crash|ro FOLDER
"""

from __future__ import annotations

import asyncio
import logging
import os
import subprocess
import sys
from pathlib import Path

from chorale.config import ServerConfig
from chorale.store.store import open_store
from tests.support.responses import serve
from tests.support.server import run

HELLO = "<|channel|>final<|message|>Hello.<|return|>"


def mount(folder: Path, *options: str) -> None:
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", ",".join(["size=1m", *options]), "tmpfs", folder], check=True
    )


def config(folder: Path) -> ServerConfig:
    return ServerConfig(system_start_date="2026-01-02", response_store=str(folder / "r.sqlite3"))


async def full_from_the_start(folder: Path) -> None:
    """No file yet, and no byte for one."""
    (folder / "ballast").write_bytes(b"x" * 2**20)
    await check_not_storing(folder, "ballast")


async def full_after_a_crash(folder: Path) -> None:
    """A file with a response of a dead process in it, then the disk fills up."""
    subprocess.run([sys.executable, "-m", "tests.support.crashing_writer", folder / "r.sqlite3"], check=False)
    with (folder / "ballast").open("wb", buffering=0) as ballast:
        try:
            while True:
                ballast.write(b"x" * 4096)
        except OSError:
            pass
    await check_not_storing(folder, "ballast")


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


if __name__ == "__main__":
    logging.basicConfig(format="LOG %(levelname)s %(message)s")
    place = Path(sys.argv[2])
    mount(place)
    run(
        lambda: {"new": full_from_the_start, "crash": full_after_a_crash, "ro": read_only}[sys.argv[1]](place)
    )
    print("held")
