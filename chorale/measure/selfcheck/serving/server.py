"""The private server that is checked: its process, its log and a client; and what its checks share."""

from __future__ import annotations

import asyncio
import re
import subprocess
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import httpx2

from chorale.measure.selfcheck.check import Failed, Found
from chorale.measure.selfcheck.recorded import Recording

_LOG_SHOWN = 600  # characters of the end of a log
_POLL = 0.1


class Started(Protocol):
    """A server's process, the socket it listens on, and the file of its output."""

    process: subprocess.Popen[bytes]
    socket: Path
    log: Path


StartServer = Callable[[], AbstractContextManager[Started]]


class Server:
    """Methods raise ``Failed`` if the server does not answer as it should."""

    def __init__(self, started: Started, client: httpx2.AsyncClient) -> None:
        self.started, self.client = started, client
        self.model = ""
        self.max_model_len = 0
        self.kv_tokens = 0  # of all engines together

    async def wait_ready(self) -> None:
        """Waits until /health is 200. The caller limits the time. Raises ``Failed`` if the process ends."""
        while self.started.process.poll() is None:
            if await self.is_healthy():
                return
            await asyncio.sleep(_POLL)
        raise Failed(f"the server ended: {self.log_tail()}")

    async def is_healthy(self) -> bool:
        try:
            return (await self.client.get("/health", timeout=5.0)).status_code == 200
        except httpx2.HTTPError:
            return False

    async def learn(self) -> str:
        """Reads the model's name and the sizes that the checks depend on, and returns them."""
        model = (await self._answer(self.client.get("/v1/models"))).json()["data"][0]
        self.model, self.max_model_len = str(model["id"]), int(model["max_model_len"])
        text = (await self._answer(self.client.get("/metrics"))).text
        engines = re.findall(r"cache_config_info\{([^}]*)\}", text)
        for labels in (dict(re.findall(r'(\w+)="([^"]*)"', engine)) for engine in engines):
            self.kv_tokens += int(labels.get("num_gpu_blocks", 0)) * int(labels.get("block_size", 0))
        return f"{self.model}: {self.max_model_len:,} tokens a request, {self.kv_tokens:,} in the KV pool"

    async def post(self, path: str, body: dict[str, Any]) -> Any:
        """Returns the parsed answer; ``model`` is added."""
        return (await self._answer(self.client.post(path, json={"model": self.model, **body}))).json()

    async def complete(self, **fields: Any) -> dict[str, Any]:
        """Returns the first choice of a raw completion."""
        found = await self.post("/v1/completions", fields)
        return dict(found["choices"][0])

    async def chat(self, **fields: Any) -> dict[str, Any]:
        """Returns the first choice of a chat completion, with the prompt's token ids if asked for."""
        found = await self.post("/v1/chat/completions", fields)
        return {"prompt_token_ids": found.get("prompt_token_ids"), **found["choices"][0]}

    async def _answer(self, sending: Awaitable[httpx2.Response]) -> httpx2.Response:
        """Raises ``Failed`` for other statuses than 200."""
        try:
            response = await sending
        except httpx2.HTTPError as error:
            raise Failed(f"no answer ({type(error).__name__} {error}); {self.log_tail()}") from None
        if response.status_code != 200:
            raise Failed(f"{response.url.path} gave {response.status_code}: {response.text[:300]}")
        return response

    def log_tail(self) -> str:
        """Returns the end of the server's output."""
        try:
            text = self.started.log.read_text("utf-8", "replace").strip()
        except OSError:
            return "(no log)"
        return "its log ends: " + " | ".join(text[-_LOG_SHOWN:].splitlines()[-6:])


def client_of(socket: Path, api_key: str | None, *, tls: bool = False) -> httpx2.AsyncClient:
    """``tls``: the server speaks TLS, with a certificate for its public name."""
    headers = {b"authorization": f"Bearer {api_key}".encode()} if api_key else {}
    return httpx2.AsyncClient(
        transport=httpx2.AsyncHTTPTransport(uds=str(socket), verify=False),
        base_url="https://localhost" if tls else "http://localhost",
        headers=headers,
        timeout=httpx2.Timeout(10.0, read=None),  # each check has its own time limit
    )


@dataclass(slots=True)
class Context:
    """``recording`` is written by the check "record" alone."""

    quick: bool
    is_slow: bool  # a full-size model without an accelerator
    has_accelerator: bool
    recording: Recording = field(default_factory=Recording)


ServerCheck = Callable[[Server, Context], Awaitable[Found]]
