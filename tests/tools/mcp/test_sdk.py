"""Our client against servers of the official SDK (1.x and 2.x, every transport), and its client against ours.

SDK 1.x cannot be installed beside 2.x: its cases run when CHORALE_TEST_MCP1_PYTHON names an interpreter that
has it, and are skipped otherwise.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from chorale.harmony.messages import ToolNamespace
from chorale.tools.contract import (
    CodeInterpreterRequest,
    CodeOutput,
    CodeStarted,
    McpDetail,
    McpProgress,
    McpRequest,
    PythonDetail,
    RequestTools,
    WebSearchRequest,
)
from chorale.tools.mcp_server.app import create_app
from chorale.tools.mcp_server.server import ServerName, ToolServer
from chorale.tools.service import BuiltinToolService
from tests.support.tools.drive import box_of, cite, drive, service_of
from tests.support.tools.sdk_server import SERVER, sdk_server

OLD_PYTHON = os.environ.get("CHORALE_TEST_MCP1_PYTHON")
SDKS = [
    pytest.param(sys.executable, id="sdk2"),
    pytest.param(
        OLD_PYTHON,
        id="sdk1",
        marks=pytest.mark.skipif(OLD_PYTHON is None, reason="CHORALE_TEST_MCP1_PYTHON unset"),
    ),
]


async def walk(service: BuiltinToolService, request: McpRequest) -> None:
    """Listing, a call, an error of the tool, an error of ours, progress."""
    label = request.server_label
    async with box_of(service, RequestTools(mcp=(request,))) as box:
        assert box.listings[0].error is None
        assert [tool.name for tool in box.listings[0].tools] == ["add", "fail", "slow", "big"]
        assert box.developer_namespaces[0].name == label
        _, added = await drive(box.call, f"{label}.add", {"a": 19, "b": 23})
        assert added.content == "42"
        assert added.detail == McpDetail(label, "add", '{"a": 19, "b": 23}', "42", None)
        _, failed = await drive(box.call, f"{label}.fail", {"reason": "because"})
        assert failed.failed
        assert "fail" in failed.content  # SDK 2.x keeps the reason to itself
        _, wrong = await drive(box.call, f"{label}.add", {"a": "no"})
        assert wrong.failed
        _, unknown = await drive(box.call, f"{label}.ad", {})
        assert f"did you mean {label}.add" in unknown.content
        progress, slept = await drive(box.call, f"{label}.slow", {"seconds": 0.1})
        assert slept.content == "slept"
        assert McpProgress("half", 1.0, 2.0) in progress
        _, big = await drive(box.call, f"{label}.big", {"size": 200_000})
        assert big.content.endswith("[134464 characters left out]")
        assert box.identify(f"{label}.add").needs_approval


@pytest.mark.parametrize("python", SDKS)
@pytest.mark.parametrize(("transport", "path"), [("streamable-http", "/mcp"), ("sse", "/sse")])
async def test_requests_and_the_flag_can_name_a_server(python: str, transport: str, path: str) -> None:
    """By address, and as ``--tool-server host:port``: vLLM's SSE address first, then streamable HTTP."""

    async with sdk_server(python, transport) as port:
        async with service_of(allow_private_hosts=True) as service:
            await walk(service, McpRequest("sample", f"http://127.0.0.1:{port}{path}"))
        async with service_of(servers=(f"127.0.0.1:{port}",)) as service:
            assert service.available["sample"].endswith("4 tools")
            async with box_of(service, RequestTools(mcp=(McpRequest("sample"),))) as box:
                _, added = await drive(box.call, "sample.add", {"a": 19, "b": 23})
                assert added.content == "42"


async def test_a_python_server_replaces_the_built_in_tool(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CLEANED", str(tmp_path / "cleaned"))

    async with (
        sdk_server(sys.executable, "sse", "python") as port,
        service_of(servers=(f"127.0.0.1:{port}",)) as service,
    ):
        wanted = RequestTools(code_interpreter=CodeInterpreterRequest())
        async with box_of(service, wanted) as box:
            assert box.system_namespaces == (ToolNamespace("python", "a sample"),)
            assert box.recipients == {"python"}
            progress, result = await drive(box.call, "python", "x = 1")
            assert result.content == "ran 5 characters"
            assert isinstance(result.detail, PythonDetail)
            assert progress == [CodeStarted(result.detail.container_id), CodeOutput("ran 5 characters")]
            assert not (tmp_path / "cleaned").exists()
        assert (tmp_path / "cleaned").read_text() == "yes"


@pytest.mark.parametrize("python", SDKS)
async def test_a_configured_program_can_be_used(python: str, tmp_path: Path) -> None:
    file = tmp_path / "mcp.json"
    entry = {"command": python, "args": [str(SERVER), "stdio"]}
    file.write_text(json.dumps({"mcpServers": {"local": entry}}))

    async with service_of(os.environ, mcp_config=str(file)) as service:
        assert service.available["local"] == "MCP program"
        await walk(service, McpRequest("local"))


# --------------------------------------------------------------------------- our servers


@contextlib.asynccontextmanager
async def our_server(name: ServerName) -> AsyncIterator[int]:
    config = {"browser": "offline"} if name == "browser" else {"python": "auto"}
    async with service_of(**config) as service:
        if name not in service.available:
            pytest.skip(service.missing[name])
        tools = ToolServer(name, service)
        listening = socket.create_server(("127.0.0.1", 0))
        app = create_app(tools, host="127.0.0.1", key=None)
        server = uvicorn.Server(
            uvicorn.Config(app, log_level="error", lifespan="off", timeout_graceful_shutdown=1)
        )
        task = asyncio.create_task(server.serve(sockets=[listening]))
        while not server.started:
            await asyncio.sleep(0.01)
        try:
            yield int(listening.getsockname()[1])
        finally:
            server.should_exit = True
            await task
            await tools.aclose()


@contextlib.asynccontextmanager
async def official_client(name: ServerName) -> AsyncIterator[Any]:
    from mcp import ClientSession  # with the next one 1 s of CPU, in one of the workers
    from mcp.client.streamable_http import streamable_http_client

    async with (
        our_server(name) as port,
        streamable_http_client(f"http://127.0.0.1:{port}/mcp") as streams,
        ClientSession(streams[0], streams[1]) as session,
    ):
        yield session


async def test_the_official_client_reaches_our_browser() -> None:
    async with official_client("browser") as session:
        await session.initialize()
        listed = await session.list_tools()
        assert [tool.name for tool in listed.tools] == ["search", "open", "find"]
        found = await session.call_tool("search", {"query": "sea otters"})
        assert found.content[0].text.startswith("[0] sea otters")
        opened = await session.call_tool("open", {"id": 0})
        assert opened.content[0].text.startswith("[1] Sea otters (https://sample.chorale.invalid/sea-otters)")
        assert not opened.is_error
        wrong = await session.call_tool("open", {"cursor": 99})
        assert wrong.is_error


async def test_the_official_client_reaches_our_python() -> None:
    async with official_client("python") as session:
        started = await session.initialize()
        assert started.server_info.name == "python"
        assert "stateful Jupyter" in (started.instructions or "")
        listed = await session.list_tools()
        assert listed.tools[0].meta == {"include_in_prompt": False}
        await session.call_tool("python", {"code": "x = 41"})
        answer = await session.call_tool("python", {"code": "x + 1"})
        assert answer.content[0].text == "42\n"


async def test_our_client_uses_our_servers_as_built_in_tools() -> None:
    request, address = RequestTools(web_search=WebSearchRequest()), "https://sample.chorale.invalid/kelp"
    async with our_server("browser") as port, service_of(servers=(f"127.0.0.1:{port}",)) as service:
        async with box_of(service, request) as box:
            assert box.system_namespaces[0].name == "browser"
            _, found = await drive(box.call, "browser.search", {"query": "kelp"})
            assert found.detail.sources[0].url == address
            _, opened = await drive(box.call, "browser.open", {"id": 0})
            assert opened.detail.url == address
            _, citations = cite(box.citation_stream(), "fast【1†L3】")
            assert [citation.url for citation in citations] == [address]
            state = box.state()
        async with box_of(service, request, state) as again:
            _, scrolled = await drive(again.call, "browser.find", {"pattern": "grow"})
            assert scrolled.content.startswith("[2] Find results")  # the server kept the session


async def test_the_command_serves_until_it_is_told_to_stop() -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-u", "-m", "chorale", "tools", "serve", "browser", "--port", "0"),
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(60):
            assert (await process.stdout.readline()).startswith(b"browser: offline, 7 pages")
            where = (await process.stdout.readline()).decode().split()[2].removesuffix("/mcp")
        async with service_of(servers=(where.removeprefix("http://"),)) as service:
            assert "3 tools" in service.available["browser"]
    finally:
        process.send_signal(signal.SIGTERM)
        await process.wait()
    assert process.returncode in (0, -signal.SIGTERM)
