"""A stream that is read later or resumed always ends, whatever became of it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from chorale.errors import EngineDeadError
from tests.support.scripted import FINAL, playing
from tests.support.server import Server, with_server

CASES: dict[str, tuple[dict[str, Any], str]] = {
    "completed": ({}, "response.completed"),
    "failed": ({"error": EngineDeadError("gone")}, "response.failed"),
    "cancelled": ({"hang": True}, "response.incomplete"),
}


@pytest.mark.parametrize("status", CASES)
def test_every_stream_ends(status: str) -> None:
    options, last = CASES[status]
    text = FINAL + "some text" + ("<|return|>" if status == "completed" else "")
    client = playing(text, delay=0.002, **options)

    async def main(server: Server) -> None:
        made = await server.sdk.responses.create(input="x", background=True)

        async def follow(after: int) -> list[Any]:
            stream = await server.sdk.responses.retrieve(made.id, stream=True, starting_after=after)
            return [event async for event in stream]

        reading = [asyncio.create_task(follow(after)) for after in (0, 1, 3)]
        while (await server.sdk.responses.retrieve(made.id)).status == "queued":
            await asyncio.sleep(0.005)
        if status == "cancelled":
            await server.sdk.responses.cancel(made.id)
            assert client.num_in_flight == 0, "its place in the engine is free"
        async with asyncio.timeout(10):
            live = await asyncio.gather(*reading)
            later = await follow(0)
        for events in (*live, later):
            assert events[-1].type == last
            assert events[-1].response.status == status
        assert live[0] == later

    with_server(client, main)
