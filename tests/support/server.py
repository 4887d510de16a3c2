"""The whole app over a scripted client or an engine: its state, requests to it, and its shutdown.

``served`` starts it: in process, or listening on a port, whose number is ``Server.port``. ``with_server``
runs a test against it, ``in_thread`` serves clients that are not asyncio's.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import httpx2
import openai
from openai.types.responses import Response
from pydantic import TypeAdapter
from starlette.requests import Request
from starlette.routing import Route, Router

from chorale.api.app import create_app
from chorale.api.batches.lines import make_runner
from chorale.api.http.auth import authenticate_routes
from chorale.api.http.middleware import HttpMiddleware, unknown_path
from chorale.api.listening import Stop, bind_sockets
from chorale.api.state import ServerState
from chorale.api.telemetry.metrics import Metrics
from chorale.client.base import EngineClient
from chorale.config.engine import ServerConfig, ToolConfig
from chorale.harmony.vocab import load_vocabulary
from chorale.jobs.background import Background
from chorale.jobs.runner import BatchRunner
from chorale.jobs.service import BatchService, open_service
from chorale.machine.processes import quiet_collector
from chorale.serve.http.app import COLLECTOR, make_services
from chorale.serve.http.server import serve_app
from chorale.store.store import ResponseStore, open_store
from chorale.tools.contract import ToolService
from chorale.tools.service import start_tools
from chorale.tracing.otel import Tracer
from tests.support import PATIENCE
from tests.support.engine.scripted_client import ScriptedClient
from tests.support.raw_http import close_connections
from tests.support.sse import frames, parse_sse

VOCAB = load_vocabulary()
Handlers = Mapping[str, Callable[[Request], Awaitable[Any]]]
STRICT_RESPONSE: TypeAdapter[Any] = TypeAdapter(Response)


@dataclass
class Listening:
    """An app that listens on a port."""

    port: int
    stop: Stop
    task: asyncio.Task[None]


@dataclass
class Server:
    http: httpx2.AsyncClient
    sdk: openai.AsyncOpenAI
    client: Any  # the given client: a ScriptedClient, or that of an engine
    state: ServerState
    app: HttpMiddleware
    strict: bool = False  # ``post`` checks every response against the SDK's type
    listening: Listening | None = None
    batches: BatchService | None = None
    runner: BatchRunner | None = None  # only of a server that does not listen

    @property
    def port(self) -> int:
        assert self.listening is not None
        return self.listening.port

    @property
    def stop(self) -> Stop:
        assert self.listening is not None
        return self.listening.stop

    @property
    def task(self) -> asyncio.Task[None]:
        assert self.listening is not None
        return self.listening.task

    @property
    def url(self) -> str:
        """The base URL for clients of OpenAI's API."""
        return f"http://127.0.0.1:{self.port}/v1"

    @property
    def store(self) -> ResponseStore:
        return self.state.store

    @property
    def tools(self) -> Any:
        return self.state.tools

    def prompt_ids(self, index: int = -1) -> list[int]:
        """Returns the tokens of a prompt that reached the engine."""
        ids: list[int] = self.client.requests[index].prompt_token_ids
        return ids

    def prompt(self, index: int = -1) -> str:
        """Returns the prompt as text, special tokens by name."""
        return VOCAB.decode(self.prompt_ids(index))

    def prompts(self) -> list[str]:
        """Returns the prompts of all rounds as text."""
        return [VOCAB.decode(each.prompt_token_ids) for each in self.client.requests]

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

    async def ask(self, method: str, path: str, status: int = 200, **body: Any) -> Any:
        """Returns the JSON of an answer with this status, or a stream's events."""
        answer = await self.http.request(method, path, json=body if method == "POST" else None)
        assert answer.status_code == status, answer.text
        is_json = answer.headers["content-type"].startswith("application/json")
        return answer.json() if is_json else frames(answer)

    async def ended(self, response_id: str) -> dict[str, Any]:
        """Returns a background response once it has ended."""
        async with asyncio.timeout(PATIENCE):
            while True:
                body: dict[str, Any] = await self.ask("GET", f"/v1/responses/{response_id}")
                if body["status"] not in ("queued", "in_progress"):
                    return body
                await asyncio.sleep(0.01)

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
    """Yields a state with these fields of ``ServerConfig`` (or ``settings``); closes its store at the end."""
    settings = settings or ServerConfig(**{"port": 0, "response_store": ":memory:", **config})
    client = client or ScriptedClient()
    kept = store if store is not None else open_store(settings)
    try:
        metrics = Metrics(names[0])
        yield ServerState(
            client, settings, VOCAB, metrics, kept, names, Background(kept), tools=tool_service,
            tracer=tracer,
        )  # fmt: skip
    finally:
        await kept.close()


@contextlib.asynccontextmanager
async def real_tools(tools: ToolConfig) -> AsyncIterator[ToolService]:
    """Yields the tools as ``chorale serve`` starts them, without keys of search services."""
    service = await start_tools(tools, {}, lambda text: len(VOCAB.encode(text)))
    try:
        yield service
    finally:
        await service.aclose()


def probe_app(state: ServerState, handlers: Handlers) -> HttpMiddleware:
    """Returns the HTTP middleware around handlers of a test, each for POST and GET."""
    routes = [Route(path, handler, methods=["GET", "POST"]) for path, handler in handlers.items()]
    return HttpMiddleware(
        Router(authenticate_routes(routes, ()), redirect_slashes=False, default=unknown_path), state
    )


@contextlib.asynccontextmanager
async def listening(app: HttpMiddleware, *, drain_grace: float = 0.0) -> AsyncIterator[Listening]:
    """Yields the app on a free port, or on the socket in its configuration."""
    config = app.state.config
    sockets = bind_sockets(config)
    port = 0 if config.uds else sockets[0].getsockname()[1]
    stop, services = Stop(), make_services(app.state)
    task = asyncio.create_task(serve_app(app, config, services, sockets, stop, drain_grace=drain_grace))
    with quiet_collector(COLLECTOR):
        try:
            yield Listening(port, stop, task)
        finally:
            await close_connections()
            stop()
            stop()
            await asyncio.wait_for(task, PATIENCE)


@contextlib.asynccontextmanager
async def _in_process(app: HttpMiddleware) -> AsyncIterator[BatchRunner | None]:
    """Runs the services that tests need: batches, and the end of background responses."""
    state = app.state
    runner = None if state.batches is None else make_runner(state)
    watching = None if runner is None else asyncio.create_task(runner.run())
    try:
        yield runner
    finally:
        if runner is not None and watching is not None:
            await runner.close()
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
        await state.background.close()


@contextlib.asynccontextmanager
async def served(
    client: Any = None,
    *,
    keys: Iterable[bytes] = (),
    api_key: str = "unused",
    strict: bool = False,
    on_response: Callable[[httpx2.Response], Awaitable[None]] | None = None,
    listens: bool = False,
    handlers: Handlers | None = None,
    tools: ToolConfig | None = None,
    **options: Any,
) -> AsyncIterator[Server]:
    """Yields the whole app, or its middleware around ``handlers``. ``keys``: hashes; ``tools``: started as by
    ``chorale serve``; ``options``: those of ``make_state``."""
    async with contextlib.AsyncExitStack() as stack:
        if tools is not None:
            service = await stack.enter_async_context(real_tools(tools))
            options = {"tools": tools, "tool_service": service, **options}
        state = await stack.enter_async_context(make_state(client, **options))
        batches = open_service(state.config, state.store)
        app = create_app(state, batches, keys) if handlers is None else probe_app(state, handlers)
        found = runner = None
        if listens:
            found = await stack.enter_async_context(listening(app))
        else:
            runner = await stack.enter_async_context(_in_process(app))
        http = httpx2.AsyncClient(
            transport=httpx2.ASGITransport(app=app),
            base_url="http://localhost",
            headers={"authorization": f"Bearer {api_key}"},
            event_hooks={"response": [on_response]} if on_response else {},
        )
        await stack.enter_async_context(http)
        sdk = openai.AsyncOpenAI(
            base_url="http://localhost/v1", api_key=api_key, http_client=http, max_retries=0
        )
        yield Server(http, sdk, state.client, state, app, strict, found, batches, runner)


served_on_port = functools.partial(served, listens=True)


def with_server(client: Any, main: Callable[[Server], Awaitable[Any]], **options: Any) -> Any:
    """Runs ``main`` against a server."""

    async def body() -> Any:
        async with served(client, **options) as server:
            return await main(server)

    return asyncio.run(body())


@contextlib.contextmanager
def in_thread(client: Any, **options: Any) -> Iterator[Server]:
    """``served`` on a port, in a thread with its own event loop."""
    servers: list[Server] = []
    ready, stop = threading.Event(), threading.Event()

    async def main() -> None:
        async with served(client, listens=True, **options) as server:
            servers.append(server)
            ready.set()
            while not stop.is_set():
                await asyncio.sleep(0.01)

    thread = threading.Thread(target=lambda: asyncio.run(main()))
    thread.start()
    try:
        assert ready.wait(PATIENCE)
        yield servers[0]
    finally:
        stop.set()
        thread.join(PATIENCE)
