"""Child process of the crash test: stores responses for ever and prints each id once acknowledged."""

from __future__ import annotations

import asyncio
import sys

from chorale.store.protocol import StoredItem, StoredResponse
from chorale.store.store import SqliteStore


async def main(path: str, run: int) -> None:
    store = SqliteStore(path)

    async def one(worker: int) -> None:
        for number in range(1_000_000):
            name = f"resp_{run:08x}{worker:08x}{number:016x}"
            item = {"type": "message", "content": name}
            response = StoredResponse(
                name, b"", None, 1.0, "completed", {"id": name}, (), (StoredItem(item, (1, 2, 3)),)
            )
            await store.put(response)
            sys.stdout.write(name + "\n")
            sys.stdout.flush()

    await asyncio.gather(*(one(worker) for worker in range(4)))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
