"""The whole app with the real tools, and a served app in a thread, for clients that are not asyncio's."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager
from dataclasses import replace

from chorale.api.app import create_app
from chorale.config import ToolConfig
from chorale.harmony.vocab import load_vocabulary
from chorale.testing.scripted_client import ScriptedClient
from chorale.tools.service import start_tools
from tests.support.app import Running, make_state, running


@contextlib.asynccontextmanager
async def tool_server(
    client: ScriptedClient, tools: ToolConfig, names: tuple[str, ...] = ("demo",)
) -> AsyncIterator[Running]:
    service = await start_tools(tools, {}, lambda text: len(load_vocabulary().encode(text)))
    try:
        async with make_state(client, tools=tools) as made:
            state = replace(made, tools=service, model_names=names)
            try:
                async with running(create_app(state)) as server:
                    yield server
            finally:
                state.grammars.close()
    finally:
        await service.aclose()


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
        assert ready.wait(20)
        yield ports[0]
    finally:
        stop.set()
        thread.join(20)
