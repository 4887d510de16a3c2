"""The private server that is checked: its process, its log and a client."""

from __future__ import annotations

import asyncio
import contextlib
import re
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

import httpx2

from chorale.selfcheck.check import Failed

_LINE = re.compile(r"([a-zA-Z_:]+)(\{[^}]*\})? (\S+)")
_LOG_SHOWN = 600  # characters of the end of a log
_POLL = 0.1


class Started(Protocol):
    """A server's process, the socket it listens on, and the file of its output."""

    @property
    def process(self) -> subprocess.Popen[bytes]: ...

    @property
    def socket(self) -> Path: ...

    @property
    def log(self) -> Path: ...


StartServer = Callable[[], AbstractContextManager[Started]]


class Server:
    """A server and what its checks share. Methods raise ``Failed`` if it does not answer as it should."""

    def __init__(self, started: Started, client: httpx2.AsyncClient) -> None:
        self.started, self.client = started, client
        self.model = ""
        self.max_model_len = 0
        self.kv_tokens = 0  # of all engines together
        self.num_engines = 1

    def __str__(self) -> str:
        sizes = f"{self.max_model_len:,} tokens a request, {self.kv_tokens:,} in the KV pool"
        return f"{self.model}: {sizes}"

    async def wait_ready(self) -> None:
        """Waits until /health is 200. The caller limits the time. Raises ``Failed`` if the process ends."""
        while True:
            if self.started.process.poll() is not None:
                raise Failed(f"the server ended: {self.log_tail()}")
            if await self.is_healthy():
                return
            await asyncio.sleep(_POLL)

    async def is_healthy(self) -> bool:
        try:
            return (await self.client.get("/health", timeout=5.0)).status_code == 200
        except httpx2.HTTPError:
            return False

    async def learn(self) -> None:
        """Reads the model's name and the sizes that the checks depend on."""
        model = (await self.get("/v1/models"))["data"][0]
        self.model, self.max_model_len = str(model["id"]), int(model["max_model_len"])
        text = (await self.client.get("/metrics")).text
        found = re.search(r"cache_config_info\{([^}]*)\}", text)
        labels = dict(re.findall(r'(\w+)="([^"]*)"', found.group(1))) if found else {}
        blocks, size = int(labels.get("num_gpu_blocks", 0)), int(labels.get("block_size", 0))
        self.num_engines = max(1, len(re.findall(r"^vllm:kv_cache_usage_perc", text, re.MULTILINE)))
        self.kv_tokens = blocks * size * self.num_engines

    async def get(self, path: str) -> Any:
        return self._body(await self._sent(self.client.get(path)), path)

    async def post(self, path: str, body: dict[str, Any]) -> Any:
        """Returns the parsed answer; ``model`` is added. Raises ``Failed`` for other statuses than 200."""
        sent = self.client.post(path, json={"model": self.model, **body})
        return self._body(await self._sent(sent), path)

    async def complete(self, **fields: Any) -> dict[str, Any]:
        """Returns the first choice of a raw completion."""
        found = await self.post("/v1/completions", fields)
        return dict(found["choices"][0])

    async def chat(self, **fields: Any) -> dict[str, Any]:
        """Returns the first choice of a chat completion, with the prompt's token ids if asked for."""
        found = await self.post("/v1/chat/completions", fields)
        return {"prompt_token_ids": found.get("prompt_token_ids"), **found["choices"][0]}

    async def _sent(self, sending: Any) -> httpx2.Response:
        try:
            response: httpx2.Response = await sending
        except httpx2.HTTPError as error:
            raise Failed(f"no answer ({type(error).__name__} {error}); {self.log_tail()}") from None
        return response

    def _body(self, response: httpx2.Response, path: str) -> Any:
        if response.status_code != 200:
            raise Failed(f"{path} gave {response.status_code}: {response.text[:300]}")
        return response.json()

    @contextlib.asynccontextmanager
    async def stream(self, path: str, body: dict[str, Any]) -> AsyncIterator[httpx2.Response]:
        fields = {"model": self.model, "stream": True, **body}
        async with self.client.stream("POST", path, json=fields) as response:
            if response.status_code != 200:
                await response.aread()
                raise Failed(f"{path} gave {response.status_code}: {response.text[:300]}")
            yield response

    async def metric(self, name: str) -> float:
        """Returns the sum of a metric over its labels."""
        return (await self.metrics()).get(name, 0.0)

    async def metrics(self) -> dict[str, float]:
        """Returns metrics by name, without prefix, summed over labels."""
        text = (await self._sent(self.client.get("/metrics"))).text
        found: dict[str, float] = {}
        for line in text.splitlines():
            if (match := _LINE.fullmatch(line)) is not None:
                name = match[1].partition(":")[2] or match[1]
                found[name] = found.get(name, 0.0) + float(match[3])
        return found

    async def wait_idle(self, seconds: float) -> None:
        """Waits until nothing runs or waits and no block of the KV pool is held. Raises ``Failed``."""
        deadline = time.monotonic() + seconds
        while True:
            found = await self.metrics()
            held = {name: found.get(name, 0.0) for name in _IDLE}
            if not any(held.values()):
                return
            if time.monotonic() > deadline:
                shown = ", ".join(f"{name} {value:g}" for name, value in held.items() if value)
                raise Failed(f"{seconds:.0f} s after the last request: {shown}")
            await asyncio.sleep(_POLL)

    def log_tail(self) -> str:
        """Returns the end of the server's output."""
        try:
            text = self.started.log.read_text("utf-8", "replace").strip()
        except OSError:
            return "(no log)"
        return "its log ends: " + " | ".join(text[-_LOG_SHOWN:].splitlines()[-6:])

    def engine_pids(self) -> list[int]:
        """Returns the engine processes of this server, by their parent and command line (Linux)."""
        found = []
        for pid in _children(self.started.process.pid):
            with contextlib.suppress(OSError):
                words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                if b"chorale.serve.engine.process" in words:
                    found.append(pid)
        return found


_IDLE = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")


def _children(parent: int) -> Iterator[int]:
    for place in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            # pid (name) state ppid: the name may hold spaces and brackets
            fields = place.read_text("utf-8", "replace").rpartition(")")[2].split()
            if int(fields[1]) == parent:
                yield int(place.parent.name)


def client_of(socket: Path, api_key: str | None, *, tls: bool = False) -> httpx2.AsyncClient:
    """``tls``: the server speaks TLS, with a certificate for its public name."""
    headers = {b"authorization": f"Bearer {api_key}".encode()} if api_key else {}
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=32)
    return httpx2.AsyncClient(
        transport=httpx2.AsyncHTTPTransport(uds=str(socket), limits=limits, verify=False),
        base_url="https://localhost" if tls else "http://localhost",
        headers=headers,
        timeout=httpx2.Timeout(10.0, read=None),  # each check has its own time limit
    )
