"""Stored responses are bounded by count, bytes and age."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.scripted import FINAL, playing
from tests.support.server import Server, served

HI = FINAL + "Hi.<|return|>"


async def make(server: Server, **fields: Any) -> str:
    answer = await server.http.post("/v1/responses", json={"input": "x" * 1000, **fields})
    assert answer.status_code == 200
    return str(answer.json()["id"])


async def status(server: Server, response_id: str) -> int:
    answer = await server.http.get(f"/v1/responses/{response_id}")
    if answer.status_code == 404:
        assert response_id in answer.json()["error"]["message"]
    return answer.status_code


@pytest.mark.parametrize(
    ("bound", "most"),
    [({"response_store_max_items": 5}, 5), ({"response_store_max_bytes": 30_000}, 9)],
)
async def test_the_oldest_responses_are_evicted_first(bound: dict[str, int], most: int) -> None:
    async with served(playing(HI), **bound) as server:
        made = [await make(server, background=number % 2 == 1) for number in range(16)]
        await server.state.background.drain()
        stats = await server.state.store.stats()
        assert 2 <= stats.num_responses <= most
        found = [await status(server, response_id) for response_id in made]
        assert found == sorted(found, reverse=True), "404 for the oldest, 200 for the newest"
        assert found.count(200) == stats.num_responses


async def test_age() -> None:
    async with served(playing(HI), response_store_ttl=-1.0) as server:
        assert await status(server, await make(server)) == 404
