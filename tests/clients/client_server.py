"""The whole app on a loopback port, for clients that know nothing of it. The model's words are scripted."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass

from scripted_helpers import VOCAB
from shell_helpers import running

from chorale.api.app import create_app
from chorale.api.metrics import Metrics
from chorale.api.responses.store import open_store
from chorale.api.state import ServerState
from chorale.client.scripted import ScriptedClient
from chorale.config import ServerConfig, ToolConfig
from chorale.tools.service import start_tools


@dataclass(frozen=True, slots=True)
class Served:
    url: str  # with /v1
    client: ScriptedClient

    def prompts(self) -> list[str]:
        """What the model was asked, round by round."""
        return [VOCAB.decode(each.prompt_token_ids) for each in self.client.requests]


@contextlib.contextmanager
def served(
    client: ScriptedClient, tools: ToolConfig | None = None, names: tuple[str, ...] = ("demo",)
) -> Iterator[Served]:
    """In a thread with a loop of its own."""
    tools = tools or ToolConfig()
    found: list[str] = []
    ready, stop = threading.Event(), threading.Event()

    async def main() -> None:
        config = ServerConfig(port=0, response_store=":memory:", tools=tools)
        store = open_store(config)
        service = await start_tools(tools, {}, lambda text: len(VOCAB.encode(text)))
        state = ServerState(client, config, VOCAB, Metrics("demo"), store, names, tools=service)
        try:
            async with running(create_app(state)) as server:
                found.append(f"http://127.0.0.1:{server.port}/v1")
                ready.set()
                while not stop.is_set():
                    await asyncio.sleep(0.01)
        finally:
            await service.aclose()
            state.grammars.close()
            await store.close()

    thread = threading.Thread(target=lambda: asyncio.run(main()))
    thread.start()
    try:
        assert ready.wait(20)
        yield Served(found[0], client)
    finally:
        stop.set()
        thread.join(20)
