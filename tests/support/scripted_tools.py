"""Scripted tools, for behaviour that real tools do not show on demand: fail, hang, return nothing."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from chorale.client.base import EngineInfo
from chorale.harmony.builtin_tools import browser_tools, python_tool
from chorale.harmony.messages import ToolNamespace
from chorale.tools.box import Box
from chorale.tools.contract import (
    CodeOutput,
    CodeStarted,
    FindAction,
    Link,
    McpDetail,
    McpListing,
    McpToolInfo,
    OpenPageAction,
    Progress,
    PythonDetail,
    RequestTools,
    SearchAction,
    Source,
    SystemTool,
    ToolCall,
    ToolResult,
)
from chorale.tools.mcp.toolset import McpToolset
from tests.support.engine.scripted_client import Script, ScriptedClient
from tests.support.responses import MODEL
from tests.support.server import Server, served

CONTAINER = "cntr_test"
PAGE = Source("https://example.com/a", "Page A", "About A.")
ECHO = McpToolInfo("echo", "Says it again.", {"type": "object", "properties": {"text": {"type": "string"}}})
NO_CLIENT: Any = None  # calls do not reach the toolset

Runner = Callable[[ToolCall], AsyncGenerator[Progress | ToolResult, None]]


def result(call: ToolCall, content: str = "", failed: bool = False) -> ToolResult:
    """Returns the result of a tool with the name in ``call``."""
    name = call.recipient.rpartition(".")[2]
    if call.recipient.startswith("browser"):
        actions = {"search": SearchAction("q", (PAGE,)), "find": FindAction("p", PAGE.url)}
        detail: Any = actions.get(name, OpenPageAction(PAGE.url))
    elif call.recipient == "python":
        detail = PythonDetail(CONTAINER, call.content, content)
    else:
        label = call.recipient.partition(".")[0]
        error = content if failed else None
        detail = McpDetail(label, name, call.content, None if failed else content, error)
    return ToolResult(call.recipient, content or "done", failed, detail)


async def plain(call: ToolCall) -> AsyncGenerator[Progress | ToolResult, None]:
    """Search finds one page, python prints 42 in two pieces, an MCP tool echoes its input."""
    if call.recipient.startswith("browser"):
        yield SearchAction("q")
        yield result(call, "[0] q (web-search://ts=0)\n**viewing lines [0 - 0] of 0**\n\nL0: A")
    elif call.recipient == "python":
        yield CodeStarted(CONTAINER)
        yield CodeOutput("4")
        yield CodeOutput("2\n")
        yield result(call, "42\n")
    else:
        yield result(call, f"echo: {call.content}")


class ScriptedTool(SystemTool):
    container_id = CONTAINER

    def __init__(self, namespace: ToolNamespace) -> None:
        self.namespace = namespace
        named = frozenset(f"{namespace.name}.{tool.name}" for tool in namespace.tools)
        self.recipients = named or frozenset((namespace.name,))

    def cited(self, cursor: int, line: int | None) -> Link | None:
        return Link(PAGE.url, PAGE.title) if cursor == 0 else None


class ScriptedBox(Box):
    """A real box, whose calls ``run`` answers."""

    def __init__(
        self, wanted: RequestTools, run: Runner, broken: Mapping[str, str], saved: Mapping[str, Any]
    ) -> None:
        """``broken``: unreachable MCP servers: label -> message."""
        self.wanted, self.run, self.saved = wanted, run, saved
        self.calls: list[ToolCall] = []
        self.aborted: list[str] = []
        self.closed = False
        system: dict[str, SystemTool] = {}
        if wanted.web_search:
            system["browser"] = ScriptedTool(browser_tools())
        if wanted.code_interpreter:
            system["python"] = ScriptedTool(python_tool(stateful=True))
        toolsets, listings = [], []
        for server in wanted.mcp:
            fault = broken.get(server.server_label)
            listings.append(McpListing(server.server_label, () if fault else (ECHO,), fault))
            if fault is None:
                toolsets.append(McpToolset(server, listings[-1], NO_CLIENT))
        super().__init__(system, toolsets, listings)

    async def call(self, call: ToolCall) -> AsyncGenerator[Progress | ToolResult, None]:
        self.calls.append(call)
        finished = False
        try:
            async for entry in self.run(call):
                finished = isinstance(entry, ToolResult)
                yield entry
        finally:
            if not finished:
                self.aborted.append(call.recipient)

    def state(self) -> dict[str, Any]:
        return {"num_calls": self.saved.get("num_calls", 0) + len(self.calls)}

    async def aclose(self) -> None:
        self.closed = True


@dataclass
class ScriptedService:
    run: Runner = plain
    available: Mapping[str, str] = field(default_factory=lambda: {"browser": "x", "python": "x", "mcp": "x"})
    missing: Mapping[str, str] = field(default_factory=dict)
    broken: dict[str, str] = field(default_factory=dict)  # of ``ScriptedBox``
    boxes: list[ScriptedBox] = field(default_factory=list)
    opened: list[tuple[str, Any]] = field(default_factory=list)

    async def open(
        self, request: RequestTools, *, session_key: str, state: Mapping[str, Any] | None = None
    ) -> ScriptedBox:
        self.opened.append((session_key, state))
        self.boxes.append(ScriptedBox(request, self.run, self.broken, state or {}))
        return self.boxes[-1]

    async def aclose(self) -> None:
        for box in self.boxes:
            await box.aclose()


@asynccontextmanager
async def tools_served(
    *texts: str | Script,
    tools: ScriptedService | None = None,
    max_model_len: int = 131072,
    tracer: Any = None,
    **options: Any,
) -> AsyncIterator[Server]:
    """The app over scripted rounds and tools; every box must be closed at the end."""
    info = EngineInfo(model="scripted", max_model_len=max_model_len, max_num_seqs=256)
    client, service = ScriptedClient(info_value=info), tools or ScriptedService()
    client.play(*texts, **options)
    given = {"names": (MODEL,), "tool_service": service, "system_start_date": "2026-01-02"}
    async with served(client, tracer=tracer, **given) as server:
        yield server
        assert all(box.closed for box in service.boxes)
