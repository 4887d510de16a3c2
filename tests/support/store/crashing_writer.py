"""A program that leaves a running background response in the store, and dies."""

from __future__ import annotations

import asyncio
import os
import signal
import sys

from chorale.store.store import SqliteStore
from tests.support.engine.scripted_client import Script
from tests.support.responses import serve


async def main(path: str) -> None:
    async with serve(Script([200005], hang=True), store=SqliteStore(path)) as server:
        for text in sys.argv[2:] or ["a"]:
            status, body = await server.post(input=text, background=True)
            assert status == 200, body
            print(body["id"], flush=True)
        await asyncio.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)


asyncio.run(main(sys.argv[1]))
