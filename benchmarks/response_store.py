"""What a stored response costs: durable puts a second, and the translator's CPU per streamed token.

Run: ``python benchmarks/response_store.py [FOLDER]`` (the folder's disk is what is measured). On a 2-core
virtual machine with a virtio disk, synchronous=FULL, clients in one event loop: 3,300 puts/s with one client
(p99 1.1 ms), 17,000 with 16, 26,000 with 64 (group commit, p99 6 ms); 560, 5,100 and 14,000 while other
programs kept both cores busy. One commit a put in a bare loop gave 5,220 a second on such a machine.
0.5 us of CPU a streamed delta.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time

from chorale.api.responses.items.objects import ResponseBuilder
from chorale.api.responses.translate import Translator
from chorale.ids import new_id
from chorale.store.protocol import StoredItem, StoredResponse
from chorale.store.store import SqliteStore
from chorale.turns.events import ItemDelta, ItemOpened

NUM_PUTS = 3000
NUM_DELTAS = 200_000


def make_response() -> StoredResponse:
    response_id = new_id("resp")
    item = {"type": "message", "id": new_id("msg"), "content": [{"type": "output_text", "text": "x" * 200}]}
    return StoredResponse(
        id=response_id,
        owner=b"",
        previous_id=None,
        created=time.time(),
        status="completed",
        body={"id": response_id, "output": []},
        input=(StoredItem({"type": "message", "role": "user", "content": "x" * 200}),),
        output=(StoredItem(item, tuple(range(60))),),
    )


async def measure_puts(folder: str | None, num_clients: int) -> None:
    seconds: list[float] = []

    async def client(responses: list[StoredResponse], store: SqliteStore) -> None:
        for response in responses:
            start = time.perf_counter()
            await store.put(response)
            seconds.append(time.perf_counter() - start)

    with tempfile.TemporaryDirectory(dir=folder) as place:
        store = SqliteStore(f"{place}/responses.sqlite3")
        responses = [make_response() for _ in range(NUM_PUTS)]
        start = time.perf_counter()
        await asyncio.gather(*(client(responses[i::num_clients], store) for i in range(num_clients)))
        total = time.perf_counter() - start
        await store.close()
    seconds.sort()
    p50, p99 = (seconds[int(NUM_PUTS * share)] * 1e3 for share in (0.5, 0.99))
    print(f"{num_clients:3} clients: {NUM_PUTS / total:8.0f} puts/s   p50 {p50:.2f} ms   p99 {p99:.2f} ms")


def measure_deltas() -> None:
    translator = Translator(ResponseBuilder({"id": "resp_x"}, None, 0, False))
    translator.start()
    translator.feed([ItemOpened(0, new_id("msg"), "message", phase="final_answer")])
    wakeups = [[ItemDelta(0, " hello", (24912,))] for _ in range(NUM_DELTAS)]
    start = time.process_time()
    for events in wakeups:
        translator.feed(events)
    print(f"translator: {(time.process_time() - start) / NUM_DELTAS * 1e6:.2f} us a delta")


if __name__ == "__main__":
    for clients in (1, 16, 64):
        asyncio.run(measure_puts(sys.argv[1] if len(sys.argv) > 1 else None, clients))
    measure_deltas()
