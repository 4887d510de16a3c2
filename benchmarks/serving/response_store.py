"""Measures stored responses: durable puts a second, CPU and bytes of a background stream, CPU of a delta.

    python -m benchmarks.serving.response_store [FOLDER]

The results depend on the disk of FOLDER. Clients share one event loop; SQLite writes with synchronous=FULL.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sqlite3
import tempfile
import time

import httpx2
from starlette.routing import Router

from chorale.api.app import all_routes
from chorale.api.http.auth import authenticate_routes
from chorale.api.responses.items.objects import ResponseBuilder
from chorale.api.responses.translate import Translator
from chorale.api.state import ServerState
from chorale.api.telemetry.metrics import Metrics
from chorale.config.engine import ServerConfig
from chorale.harmony.vocab import Vocabulary, load_vocabulary
from chorale.ids import new_id
from chorale.jobs.background import Background
from chorale.store.protocol import StoredItem, StoredResponse
from chorale.store.store import SqliteStore
from chorale.turns.events import ItemDelta, ItemOpened
from tests.support.engine.scripted_client import Script, ScriptedClient

NUM_PUTS = 3000
NUM_DELTAS = 200_000
NUM_TOKENS, NUM_STREAMS = 2000, 5


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

    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        store = SqliteStore(f"{scratch}/responses.sqlite3")
        responses = [make_response() for _ in range(NUM_PUTS)]
        start = time.perf_counter()
        await asyncio.gather(*(client(responses[i::num_clients], store) for i in range(num_clients)))
        total = time.perf_counter() - start
        await store.close()
    seconds.sort()
    p50, p99 = (seconds[int(NUM_PUTS * share)] * 1e3 for share in (0.5, 0.99))
    print(f"{num_clients:3} clients: {NUM_PUTS / total:8.0f} puts/s   p50 {p50:.2f} ms   p99 {p99:.2f} ms")


async def measure_stream(folder: str | None, vocab: Vocabulary) -> None:
    """Measures background responses with a reader: CPU of the HTTP process, and bytes in the store."""
    words = "".join(f"{number} words, " for number in range(NUM_TOKENS // 4))
    script = vocab.encode_with_special(f"<|channel|>final<|message|>{words}<|return|>")
    engine = ScriptedClient(lambda request, index: Script(script))
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        store = SqliteStore(f"{scratch}/responses.sqlite3")
        config = ServerConfig(system_start_date="2026-01-02")
        state = ServerState(engine, config, vocab, Metrics("m"), store, ("m",), Background(store))
        routing = Router(authenticate_routes(all_routes(state), ()))
        async with httpx2.AsyncClient(transport=httpx2.ASGITransport(routing), base_url="http://x") as http:
            body = {"input": "hello", "background": True, "stream": True}
            seconds, read = [], []
            for _ in range(NUM_STREAMS):
                start = time.process_time()
                answer = await http.post("/v1/responses", json=body)
                seconds.append(time.process_time() - start)
                path = f"/v1/responses/{json.loads(answer.text.split(chr(10))[1][6:])['response']['id']}"
                start = time.process_time()
                assert (await http.get(f"{path}?stream=true")).content == answer.content
                read.append(time.process_time() - start)
        await state.background.drain()
        num_bytes = (await store.stats()).num_bytes / NUM_STREAMS / len(script)
        size = sqlite3.connect(f"{scratch}/responses.sqlite3").execute("SELECT SUM(length(data)) FROM events")
        stored = size.fetchone()[0] / NUM_STREAMS / len(script)
        await engine.close()
        await store.close()
    print(
        f"background stream of {len(script)} tokens: {stored:.1f} bytes of events a token in the store"
        f" ({num_bytes:.1f} with the row), {min(seconds) * 1e3:.0f} ms live, "
        f"{min(read) * 1e3:.0f} ms read again"
    )


def measure_deltas() -> None:
    translator = Translator(ResponseBuilder({"id": "resp_x", "status": "in_progress"}, None, 0, False))
    translator.start()
    translator.feed([ItemOpened(0, new_id("msg"), "message", phase="final_answer")])
    wakeups = [[ItemDelta(0, " hello", (24912,))] for _ in range(NUM_DELTAS)]
    start = time.process_time()
    for events in wakeups:
        translator.feed(events)
    print(f"translator: {(time.process_time() - start) / NUM_DELTAS * 1e6:.2f} us a delta")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", nargs="?", help="where the store is written (default: a temporary folder)")
    folder = parser.parse_args().folder
    for clients in (1, 16, 64):
        asyncio.run(measure_puts(folder, clients))
    measure_deltas()
    asyncio.run(measure_stream(folder, load_vocabulary()))


if __name__ == "__main__":
    main()
