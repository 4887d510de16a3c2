"""The whole app with the real tools, and a served app in a thread, for clients that are not asyncio's."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager

from chorale.api.app import create_app
from chorale.config import ToolConfig
from chorale.testing.scripted_client import ScriptedClient
from tests.support import PATIENCE
from tests.support.app import Running, running
from tests.support.server import make_state, real_tools


@contextlib.asynccontextmanager
async def tool_server(
    client: ScriptedClient, tools: ToolConfig, names: tuple[str, ...] = ("demo",)
) -> AsyncIterator[Running]:
    async with (
        real_tools(tools) as service,
        make_state(client, tools=tools, tool_service=service, names=names) as state,
        running(create_app(state)) as server,
    ):
        yield server


@contextlib.contextmanager
def in_thread(made: AbstractAsyncContextManager[Running]) -> Iterator[int]:
    """Enter ``made`` in a thread with a loop of its own; yields the server's port."""
    ports: list[int] = []
    ready, stop = threading.Event(), threading.Event()

    async def main() -> None:
        async with made as server:
            ports.append(server.port)
            ready.set()
            while not stop.is_set():
                await asyncio.sleep(0.01)

    thread = threading.Thread(target=lambda: asyncio.run(main()))
    thread.start()
    try:
        assert ready.wait(PATIENCE)
        yield ports[0]
    finally:
        stop.set()
        thread.join(PATIENCE)
