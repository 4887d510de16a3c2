"""kill -9 of the server, or of its engine, during a batch: each line ends up in exactly one file, once.

The engine is the product's process around a fake device; server, store, supervisor and client are real.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.acceptance.e2e.test_killed_servers import client, started
from tests.serve.test_supervisor import Supervised
from tests.support.ports import free_port
from tests.support.processes import children

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def lines(number: int) -> bytes:
    """Returns the lines of a batch; the endpoint refuses every hundredth."""
    made = (
        {
            "custom_id": f"n{index}",
            "method": "POST",
            "url": "/v1/completions",
            "body": {
                "prompt": f"line {index}",
                "max_tokens": 1 + index % 5,
                "ignore_eos": True,
                "temperature": -1 if index % 100 == 99 else 0,
            },
        }
        for index in range(number)
    )
    return b"\n".join(json.dumps(line).encode() for line in made)


async def upload(http: httpx2.AsyncClient, content: bytes) -> str:
    answer = await http.post("/v1/files", files={"file": ("in.jsonl", content)}, data={"purpose": "batch"})
    assert answer.status_code == 200, answer.text
    body = {
        "input_file_id": answer.json()["id"],
        "endpoint": "/v1/completions",
        "completion_window": "24h",
    }
    answer = await http.post("/v1/batches", json=body)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["id"])


async def progressed(http: httpx2.AsyncClient, batch_id: str, number: int) -> dict[str, Any]:
    """Returns the batch once ``number`` of its lines are finished, or it has ended."""
    async with asyncio.timeout(240):
        while True:
            with contextlib.suppress(httpx2.TransportError):
                batch: dict[str, Any] = (await http.get(f"/v1/batches/{batch_id}")).json()
                counts = batch["request_counts"]
                if counts["completed"] + counts["failed"] >= number or batch["completed_at"]:
                    return batch
            await asyncio.sleep(0.02)


async def content(http: httpx2.AsyncClient, file_id: str) -> list[dict[str, Any]]:
    answer = await http.get(f"/v1/files/{file_id}/content")
    assert answer.status_code == 200
    assert len(answer.content) == (await http.get(f"/v1/files/{file_id}")).json()["bytes"]
    return [json.loads(line) for line in answer.content.splitlines()]


def check(number: int, batch: dict[str, Any], output: list[Any], errors: list[Any]) -> None:
    assert batch["status"] == "completed"
    assert batch["request_counts"] == {
        "total": number, "completed": len(output), "failed": len(errors)
    }  # fmt: skip
    seen = Counter(record["custom_id"] for record in output + errors)
    assert seen == Counter({f"n{index}": 1 for index in range(number)})
    assert {record["custom_id"] for record in errors} == {f"n{i}" for i in range(99, number, 100)}
    used = [record["response"]["body"]["usage"]["completion_tokens"] for record in output]
    assert used == [1 + int(record["custom_id"][1:]) % 5 for record in output]
    assert batch["usage"]["output_tokens"] == sum(used)


def killed(
    folder: Path, number: int, num_kills: int, concurrency: int | None = None, seed: int = 7
) -> tuple[float, int]:
    """Runs a batch with kills. Returns the seconds it took and the number of kills while it was running.

    ``concurrency``: lines that run at a time; few, so that a small batch is not over before a kill.
    """
    rng, store, port = random.Random(seed), str(folder / "store.sqlite3"), free_port()
    began, num_met, batch_id = time.monotonic(), 0, ""
    # Each kill comes at a random moment within its share of the lines; the last share has no kill.
    marks = [int((kill + rng.random()) * number / (num_kills + 1)) for kill in range(num_kills)]

    async def until_kill(mark: int, of_engine: bool, server: Supervised) -> None:
        nonlocal batch_id, num_met
        async with client(server) as http:
            batch_id = batch_id or await upload(http, lines(number))
            batch = await progressed(http, batch_id, mark)
            await asyncio.sleep(rng.uniform(0, 0.05))
            num_met += batch["status"] == "in_progress"
            if of_engine:
                os.kill(rng.choice(sorted(children(server.process.pid))), signal.SIGKILL)

    async def finish(server: Supervised) -> None:
        async with client(server) as http:
            batch = await progressed(http, batch_id, number + 1)
            check(
                number,
                batch,
                await content(http, batch["output_file_id"]),
                await content(http, batch["error_file_id"]),
            )
            listed = (await http.get("/v1/files")).json()["data"]
            assert len(listed) == 3  # no files of earlier attempts are left

    while marks:
        with started(store, port, batch_max_concurrency=concurrency) as server:
            while marks:
                of_engine = rng.random() < 0.3
                asyncio.run(until_kill(marks.pop(0), of_engine, server))
                if not of_engine:
                    break
    with started(store, port) as server:
        asyncio.run(finish(server))
    return time.monotonic() - began, num_met


def test_each_line_ends_in_one_file_once(tmp_path: Path) -> None:
    _, num_met = killed(tmp_path, 300, 2, concurrency=8)
    assert num_met == 2


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_ten_thousand_lines_and_twenty_kills(tmp_path: Path) -> None:
    seconds, num_met = killed(tmp_path, 10_000, 20)
    print(f"10,000 lines, 20 kills ({num_met} met the batch at work): {seconds:.0f} s")
    assert num_met == 20
