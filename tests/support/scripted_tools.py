"""Scripted tools, for behaviour that real tools do not show on demand: fail, hang, return nothing."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from chorale.client.base import EngineInfo
from chorale.harmony.builtin_tools import browser_tools, python_tool
from chorale.harmony.messages import ToolDescription, ToolNamespace
from chorale.tools.browser.citations import CitationRewriter
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
    ToolCall,
    ToolIdentity,
    ToolResult,
)
from tests.support.engine.scripted_client import Script, ScriptedClient
from tests.support.responses import MODEL
from tests.support.server import Server, served

CONTAINER = "cntr_test"
PAGE = Source("https://example.com/a", "Page A", "About A.")
ECHO = McpToolInfo("echo", "Says it again.", {"type": "object", "properties": {"text": {"type": "string"}}})

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


@dataclass
class ScriptedBox:
    wanted: RequestTools
    run: Runner
    service: ScriptedService
    saved: dict[str, Any]
    container_id: str | None = CONTAINER
    calls: list[ToolCall] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    closed: bool = False

    @property
    def system_namespaces(self) -> tuple[ToolNamespace, ...]:
        found = [browser_tools()] if self.wanted.web_search else []
        return (*found, python_tool(stateful=True)) if self.wanted.code_interpreter else tuple(found)

    @property
    def developer_namespaces(self) -> tuple[ToolNamespace, ...]:
        tools = (ToolDescription(ECHO.name, "Says it again.", ECHO.input_schema),)
        return tuple(
            ToolNamespace(server.server_label, "A server.", tools)
            for server in self.wanted.mcp
            if server.server_label not in self.service.broken
        )

    @property
    def recipients(self) -> frozenset[str]:
        names: set[str] = set()
        for namespace in (*self.system_namespaces, *self.developer_namespaces):
            names |= {f"{namespace.name}.{tool.name}" for tool in namespace.tools} or {namespace.name}
        return frozenset(names)

    @property
    def listings(self) -> tuple[McpListing, ...]:
        broken = self.service.broken
        return tuple(
            McpListing(
                s.server_label, () if s.server_label in broken else (ECHO,), broken.get(s.server_label)
            )
            for s in self.wanted.mcp
        )

    def owns(self, recipient: str) -> bool:
        return recipient.partition(".")[0] in {name.partition(".")[0] for name in self.recipients}

    def identify(self, recipient: str) -> ToolIdentity:
        namespace, _, name = recipient.partition(".")
        if namespace in ("browser", "python"):
            return ToolIdentity("browser" if name else "python", namespace, name or namespace)
        server = next(s for s in self.wanted.mcp if s.server_label == namespace)
        return ToolIdentity("mcp", namespace, name, server.require_approval)

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

    def citation_stream(self) -> CitationRewriter:
        return CitationRewriter(lambda cursor, line: Link(PAGE.url, PAGE.title) if cursor == 0 else None)

    def state(self) -> dict[str, Any]:
        return {"num_calls": self.saved.get("num_calls", 0) + len(self.calls)}

    async def aclose(self) -> None:
        self.closed = True


@dataclass
class ScriptedService:
    run: Runner = plain
    available: Mapping[str, str] = field(default_factory=lambda: {"browser": "x", "python": "x", "mcp": "x"})
    missing: Mapping[str, str] = field(default_factory=dict)
    broken: dict[str, str] = field(default_factory=dict)  # unreachable MCP servers: label -> message
    boxes: list[ScriptedBox] = field(default_factory=list)
    opened: list[tuple[str, Any]] = field(default_factory=list)

    async def open(
        self, request: RequestTools, *, session_key: str, state: Mapping[str, Any] | None = None
    ) -> ScriptedBox:
        self.opened.append((session_key, state))
        self.boxes.append(ScriptedBox(request, self.run, self, dict(state or {})))
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
