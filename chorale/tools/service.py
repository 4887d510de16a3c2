"""The built-in tools of an HTTP process: selected once at start, opened for each response."""

from __future__ import annotations

import asyncio
import hashlib
import re
import time
from collections.abc import Callable, Mapping
from typing import Any

from chorale.config.engine import ToolConfig
from chorale.errors import ConfigError
from chorale.machine.tasks import end_tasks
from chorale.tools.box import Box
from chorale.tools.browser.backends import SearchBackend
from chorale.tools.browser.history import History
from chorale.tools.browser.tool import Browser, PageCache
from chorale.tools.contract import (
    CodeInterpreterRequest,
    McpListing,
    McpRequest,
    RequestTools,
    SystemTool,
    WebSearchRequest,
)
from chorale.tools.mcp.builtin import CLEANUP, RemoteBrowser, RemotePython
from chorale.tools.mcp.client import McpClient, McpLimits
from chorale.tools.mcp.servers import (
    Server,
    client_of,
    fault_of,
    from_flag,
    from_request,
    namespace_name,
    read_mcp_config,
)
from chorale.tools.mcp.toolset import McpToolset, allowed, safe_name
from chorale.tools.mcp.wire import McpError
from chorale.tools.net.fetch import Fetcher
from chorale.tools.options import COMPILING, Found, choose_backend, choose_sandbox, fetchers
from chorale.tools.python.tool import PythonTool, SessionPool, new_container_id

_CONTAINER = re.compile(r"cntr_[0-9a-f]{16,64}")
_MAX_SERVERS = 16  # MCP servers per request
_SEEK_SECONDS = 15.0  # interval between attempts to reach a --tool-server
_LISTING_SECONDS = 300.0  # time for which a configured server's list of tools is reused

CountTokens = Callable[[str], int]


class BuiltinToolService:
    """Implements ``ToolService``. Created by ``start_tools``."""

    def __init__(
        self,
        config: ToolConfig,
        count: CountTokens,
        found: Found,
        backend: SearchBackend | None,
        pool: SessionPool | None,
        page_fetchers: tuple[Fetcher, Fetcher],
        servers: Mapping[str, Server],
    ) -> None:
        self._config = config
        self._count = count
        self._found = found
        self._backend = backend
        self._pool = pool
        self._fetchers = page_fetchers
        self._servers = dict(servers)  # label, or "browser"/"python", -> server
        self._instructions: dict[str, str] = {}
        self._listings: dict[str, tuple[float, McpListing]] = {}
        self._cache = PageCache()
        self._limits = McpLimits(call_seconds=config.call_timeout)
        self._seeker: asyncio.Task[None] | None = None

    @property
    def available(self) -> Mapping[str, str]:
        if self._pool is not None and not self._pool.is_compiling:  # the line was written at the start
            line = self._found.available["python"]
            self._found.available["python"] = line.removesuffix(COMPILING)
        return self._found.available

    @property
    def missing(self) -> Mapping[str, str]:
        return self._found.missing

    async def open(
        self, request: RequestTools, *, session_key: str, state: Mapping[str, Any] | None = None
    ) -> Box:
        kept = state or {}
        system: dict[str, SystemTool | None] = {}
        if request.web_search is not None:
            system["browser"] = self._browser(request.web_search, session_key, kept.get("browser"))
        if request.code_interpreter is not None:
            system["python"] = self._python(request.code_interpreter, session_key, kept.get("python"))
        there = {name: tool for name, tool in system.items() if tool is not None}
        return Box(there, *await self._toolsets(request.mcp, session_key))

    # ------------------------------------------------------------------ browser and python

    def _browser(self, request: WebSearchRequest, session_key: str, state: Any) -> SystemTool | None:
        if "browser" in self._servers:
            client = self._client(self._servers["browser"], session_key)
            return RemoteBrowser(client, state, cleans_up=self._cleans_up("browser"))
        if self._backend is None:
            return None
        history = History.restored(state)
        return Browser(self._backend, self._fetchers[0], self._cache, self._count, request, history)

    def _python(self, request: CodeInterpreterRequest, session_key: str, state: Any) -> SystemTool | None:
        kept = state.get("container") if isinstance(state, Mapping) else None
        known = isinstance(kept, str) and bool(_CONTAINER.fullmatch(kept)) and request.container_id is None
        container = str(kept) if known else container_id(request.container_id)
        if "python" in self._servers:
            client = self._client(self._servers["python"], session_key)
            instructions = self._instructions.get("python", "")
            return RemotePython(client, container, instructions, cleans_up=self._cleans_up("python"))
        if self._pool is None:
            return None
        return PythonTool(self._pool, container, known=known, memory_bytes=request.memory_bytes)

    def _cleans_up(self, label: str) -> bool:
        kept = self._listings.get(label)
        return kept is not None and any(tool.name == CLEANUP for tool in kept[1].tools)

    # ------------------------------------------------------------------ MCP

    async def _toolsets(
        self, requests: tuple[McpRequest, ...], session_key: str
    ) -> tuple[list[McpToolset], list[McpListing]]:
        """Connects to servers concurrently. If cancelled, closes all connections."""
        asked = [
            asyncio.create_task(self._open_server(request, session_key, n))
            for n, request in enumerate(requests)
        ]
        try:
            opened = await asyncio.gather(*asked)
        except BaseException:
            for task in asked:
                task.cancel()
            for found in await asyncio.gather(*asked, return_exceptions=True):
                if isinstance(found, tuple) and found[0] is not None:
                    await found[0].aclose()
            raise
        toolsets: dict[str, McpToolset] = {}
        listings: list[McpListing] = []
        for toolset, listing in opened:
            if toolset is not None and toolset.name in toolsets:
                await toolset.aclose()
                listing = McpListing(listing.server_label, (), "another server has this label")
            elif toolset is not None:
                toolsets[toolset.name] = toolset
            listings.append(listing)
        return list(toolsets.values()), listings

    async def _open_server(
        self, request: McpRequest, session_key: str, number: int
    ) -> tuple[McpToolset | None, McpListing]:
        client: McpClient | None = None
        try:
            if number >= _MAX_SERVERS:
                raise McpError(f"at most {_MAX_SERVERS} MCP servers can be used at once")
            namespace_name(request.server_label)
            client = self._client(self._server_of(request), session_key)
            listing = allowed(await self._list(request, client), request)
            return McpToolset(request, listing, client), listing
        except McpError as fault:
            if client is not None:
                await client.aclose()
            return None, McpListing(request.server_label, (), fault.message)
        except BaseException:
            if client is not None:
                await client.aclose()
            raise

    def _server_of(self, request: McpRequest) -> Server:
        if request.server_url is None:
            if request.server_label not in self._servers:
                raise McpError(f"unknown MCP server {request.server_label!r}; set server_url")
            return self._servers[request.server_label]
        if not self._config.mcp_requests:
            raise McpError("MCP servers by address are disabled on this server")
        return from_request(request)

    async def _list(self, request: McpRequest, client: McpClient) -> McpListing:
        """Lists a server's tools. The list of a configured server is reused for a while."""
        kept = self._listings.get(request.server_label) if request.server_url is None else None
        if kept is not None and time.monotonic() - kept[0] < _LISTING_SECONDS:
            return kept[1]
        await client.connect()
        listing = McpListing(request.server_label, await client.list_tools())
        if request.server_url is None:
            self._listings[request.server_label] = (time.monotonic(), listing)
        return listing

    def _client(self, server: Server, session_key: str) -> McpClient:
        return client_of(server, self._limits, session_key, allow_private=self._config.allow_private_hosts)

    async def find_servers(self, entries: tuple[str, ...]) -> None:
        """Asks each ``--tool-server`` for its name; retries those that do not respond later."""
        silent = [entry for entry in entries if not await self._find(entry)]
        if silent:
            self._seeker = asyncio.create_task(self._seek(silent))

    async def _seek(self, entries: list[str]) -> None:
        while entries:
            await asyncio.sleep(_SEEK_SECONDS)
            entries = [entry for entry in entries if not await self._find(entry)]

    async def _find(self, entry: str) -> bool:
        server = from_flag(entry)
        client = self._client(server, f"start {entry}")
        try:
            await client.connect()
            tools = await client.list_tools()
            self._register(entry, server, client, McpListing("", tools))
        except McpError as fault:
            self._found.missing[entry] = fault.message
            return False
        finally:
            await client.aclose()
        self._found.missing.pop(entry, None)
        return True

    def _register(self, entry: str, server: Server, client: McpClient, listing: McpListing) -> None:
        name = client.info.name
        label = name if name in ("browser", "python") else safe_name(name or entry)
        if label in self._servers or label in self._found.available:
            raise McpError(f"a second server named {label!r}")
        if label not in ("browser", "python"):
            namespace_name(label)
        self._servers[label] = server
        self._instructions[label] = client.info.instructions
        self._listings[label] = (time.monotonic(), McpListing(label, listing.tools))
        self._found.available[label] = f"MCP server {entry}, {len(listing.tools)} tools"

    async def aclose(self) -> None:
        await end_tasks(self._seeker)
        if self._pool is not None:
            await self._pool.aclose()
        for fetcher in self._fetchers:
            await fetcher.aclose()


def container_id(wanted: str | None) -> str:
    """Returns a new id, or the one that a request names; other names are replaced by a derived id."""
    if wanted is None or wanted == "auto":
        return new_container_id()
    if _CONTAINER.fullmatch(wanted):
        return wanted
    return "cntr_" + hashlib.sha256(wanted.encode("utf-8", "replace")).hexdigest()[:48]


async def start_tools(
    config: ToolConfig, environment: Mapping[str, str], count: CountTokens, *, patient: bool = False
) -> BuiltinToolService:
    """Starts the tools. ``environment``: holds the keys of search services. ``count``: counts tokens of a
    text.

    ``patient``: wait for work that would otherwise run in the background.

    A tool that cannot run is listed in ``missing``. Raises ``ConfigError`` for invalid options.
    """
    found = Found()
    entries = tuple(entry for entry in config.servers if entry != "demo")
    for entry in entries:
        from_flag(entry)  # raises before anything is started
    page_fetchers = fetchers(config)
    try:
        backend = await asyncio.to_thread(choose_backend, config, environment, found, page_fetchers[1])
        pool = await choose_sandbox(config, environment, found, patient=patient)
        servers = read_mcp_config(config.mcp_config, environment) if config.mcp_config else {}
    except ConfigError:
        for fetcher in page_fetchers:
            await fetcher.aclose()
        raise
    for label, server in servers.items():
        fault = fault_of(server)
        if fault is not None:
            found.missing[label] = fault
        else:
            found.available[label] = "MCP program" if not hasattr(server, "urls") else "MCP server"
    if config.mcp_requests:
        found.available["mcp"] = "servers named by a request"
    service = BuiltinToolService(config, count, found, backend, pool, page_fetchers, servers)
    await service.find_servers(entries)
    return service


async def probe_tools(config: ToolConfig, environment: Mapping[str, str], *, patient: bool = False) -> Found:
    """Tests the tools for the banner and ``chorale tools check``. Raises ``ConfigError``."""
    service = await start_tools(config, environment, len, patient=patient)
    await service.aclose()
    return Found(dict(service.available), dict(service.missing))
