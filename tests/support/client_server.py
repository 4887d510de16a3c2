"""The whole app on a loopback port, for clients that know nothing of it. The model's words are scripted."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

from chorale.config import ToolConfig
from chorale.testing.scripted_client import ScriptedClient
from tests.support.server import VOCAB
from tests.support.threads import in_thread, tool_server


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
    with in_thread(tool_server(client, tools or ToolConfig(), names)) as port:
        yield Served(f"http://127.0.0.1:{port}/v1", client)
