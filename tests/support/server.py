"""The whole app in process, over a scripted client or an engine: its state, requests to it, and its end."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any

import httpx2
import openai
from openai.types.responses import Response
from pydantic import TypeAdapter

from chorale.api.app import create_app
from chorale.api.batches.lines import make_runner
from chorale.api.batches.service import open_service
from chorale.api.http.middleware import HttpMiddleware
from chorale.api.operator.metrics import Metrics
from chorale.api.state import ServerState
from chorale.client.base import EngineClient
from chorale.config import ServerConfig, ToolConfig
from chorale.harmony.vocab import load_vocabulary
from chorale.store.store import ResponseStore, open_store
from chorale.testing.scripted_client import Script, ScriptedClient
from chorale.tools.contract import ToolService
from chorale.tools.service import start_tools
from chorale.tracing.context import Tracer
from tests.support import PATIENCE
from tests.support.sse import parse_sse

VOCAB = load_vocabulary()
STRICT_RESPONSE: TypeAdapter[Any] = TypeAdapter(Response)


@dataclass
class Server:
    http: httpx2.AsyncClient
    sdk: openai.AsyncOpenAI
    client: Any  # as given: ScriptedClient, or an engine's
    state: ServerState
    app: HttpMiddleware
    strict: bool = False  # every response that ``post`` reads has the SDK's type

    @property
    def store(self) -> ResponseStore:
        return self.state.store

    @property
    def tools(self) -> Any:
        return self.state.tools

    def prompt_ids(self, index: int = -1) -> list[int]:
        """A prompt that reached the engine."""
        ids: list[int] = self.client.requests[index].prompt_token_ids
        return ids

    def prompt(self, index: int = -1) -> str:
        """The same as text, special tokens by name."""
        return VOCAB.decode(self.prompt_ids(index))

    async def post(self, path: str = "/v1/responses", **body: Any) -> Any:
        """(status, JSON)"""
        answer = await self.http.post(path, json={"model": self.state.model_names[0], **body})
        if self.strict and answer.status_code == 200:
            STRICT_RESPONSE.validate_json(answer.content, strict=True)
        return answer.status_code, answer.json()

    async def stream(self, path: str = "/v1/responses", **body: Any) -> bytes:
        answer = await self.http.post(path, json={"model": self.state.model_names[0], "stream": True, **body})
        assert answer.status_code == 200, answer.text
        assert answer.headers["content-type"].startswith("text/event-stream")
        return answer.content

    async def events(self, **body: Any) -> list[dict[str, Any]]:
        return parse_sse(await self.stream(**body))

    async def respond(self, **body: Any) -> Any:
        status, answer = await self.post(**body)
        assert status == 200, answer
        return answer

    async def chat(self, content: str = "hi", **fields: Any) -> httpx2.Response:
        body = {"messages": [{"role": "user", "content": content}], **fields}
        return await self.http.post("/v1/chat/completions", json=body)

    async def complete(self, prompt: Any = "hi", **fields: Any) -> httpx2.Response:
        return await self.http.post("/v1/completions", json={"prompt": prompt, **fields})


@contextlib.asynccontextmanager
async def make_state(
    client: EngineClient | None = None,
    *,
    names: tuple[str, ...] = ("demo", "gpt-oss-20b"),
    store: ResponseStore | None = None,
    settings: ServerConfig | None = None,
    tool_service: ToolService | None = None,
    tracer: Tracer | None = None,
    **config: Any,
) -> AsyncIterator[ServerState]:
    """A state of these fields of ``ServerConfig`` (or ``settings``); its store is closed at the end."""
    settings = settings or ServerConfig(**{"port": 0, "response_store": ":memory:", **config})
    client = client or ScriptedClient(lambda request, index: Script((200005, 17196, 200008, 13225, 200002)))
    kept = store if store is not None else open_store(settings)
    try:
        metrics = Metrics(names[0])
        yield ServerState(
            client, settings, VOCAB, metrics, kept, names, tools=tool_service, tracer=tracer,
            batches=open_service(settings, kept),
        )  # fmt: skip
    finally:
        await kept.close()


@contextlib.asynccontextmanager
async def real_tools(tools: ToolConfig) -> AsyncIterator[ToolService]:
    """The tools as ``chorale serve`` starts them; no key of a search service is seen."""
    service = await start_tools(tools, {}, lambda text: len(VOCAB.encode(text)))
    try:
        yield service
    finally:
        await service.aclose()


@contextlib.asynccontextmanager
async def served(
    client: Any = None,
    *,
    keys: Iterable[bytes] = (),
    api_key: str = "unused",
    strict: bool = False,
    on_response: Callable[[httpx2.Response], Awaitable[None]] | None = None,
    **options: Any,
) -> AsyncIterator[Server]:
    """The whole app. ``keys`` are hashes; ``options`` are those of ``make_state``."""
    async with make_state(client, **options) as state:
        app = create_app(state, keys)
        http = httpx2.AsyncClient(
            transport=httpx2.ASGITransport(app=app),
            base_url="http://localhost",
            headers={"authorization": f"Bearer {api_key}"},
            event_hooks={"response": [on_response]} if on_response else {},
        )
        sdk = openai.AsyncOpenAI(
            base_url="http://localhost/v1", api_key=api_key, http_client=http, max_retries=0
        )
        runner = None if state.batches is None else make_runner(app.state, state.batches)
        watching = None if runner is None else asyncio.create_task(runner.watch())
        try:
            yield Server(http, sdk, state.client, state, app, strict)
        finally:
            await http.aclose()
            if runner is not None and watching is not None:
                await runner.close()
                watching.cancel()
                await asyncio.gather(watching, return_exceptions=True)
            await state.background.close(state.store)


def with_server(
    client: Any, main: Callable[[Server], Awaitable[Any]], *, seconds: float = PATIENCE, **options: Any
) -> Any:
    """Run ``main`` against a server; a test that hangs fails in ``seconds``."""

    async def body() -> Any:
        async with served(client, **options) as server:
            return await asyncio.wait_for(main(server), seconds)

    return asyncio.run(body())


def run(main: Callable[[], Awaitable[Any]]) -> Any:
    """Run a test's coroutine function; a test that hangs fails."""

    async def limited() -> Any:
        return await asyncio.wait_for(main(), PATIENCE)

    return asyncio.run(limited())
