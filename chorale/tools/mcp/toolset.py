"""An MCP server's tools in a conversation: their description for the model, and calls."""

from __future__ import annotations

import contextlib
import re
from collections.abc import AsyncGenerator, Mapping
from typing import Any

from chorale.harmony.messages import ToolDescription, ToolNamespace
from chorale.tools.arguments import parse_object
from chorale.tools.contract import (
    McpDetail,
    McpListing,
    McpProgress,
    McpRequest,
    McpToolInfo,
    Progress,
    ToolCall,
    ToolResult,
)
from chorale.tools.errors import ToolError
from chorale.tools.mcp.client import CallOutcome, McpClient
from chorale.tools.mcp.servers import namespace_name

_EMPTY = "[the tool returned nothing]"


class McpToolset:
    """The tools of a listing."""

    def __init__(self, request: McpRequest, listing: McpListing, client: McpClient) -> None:
        self._request = request
        self._client = client
        self.label = request.server_label
        self.name = namespace_name(request.server_label)
        self._tools = {safe_name(tool.name): tool for tool in listing.tools}

    @property
    def namespace(self) -> ToolNamespace:
        described = tuple(
            ToolDescription(name, tool.description or "", _parameters(tool.input_schema))
            for name, tool in self._tools.items()
        )
        return ToolNamespace(self.name, self._request.description, described)

    @property
    def recipients(self) -> frozenset[str]:
        return frozenset(f"{self.name}.{name}" for name in self._tools)

    def real_name(self, name: str) -> str:
        """Returns the server's name of a tool that the model knows as ``name``."""
        tool = self._tools.get(name)
        return tool.name if tool is not None else name

    def needs_approval(self, name: str) -> bool:
        real, request = self.real_name(name), self._request
        if real in request.never_approve:
            return False
        return request.require_approval or real in request.always_approve

    async def call(self, call: ToolCall) -> AsyncGenerator[Progress | ToolResult, None]:
        """Calls a tool. Every failure of the server becomes a result."""
        name = self.real_name(call.recipient.partition(".")[2])
        try:
            arguments = parse_object(call.content)
            async with contextlib.aclosing(self._client.run(name, arguments, call.call_id)) as items:
                async for item in items:
                    yield item if isinstance(item, McpProgress) else self._result(call, name, item)
        except ToolError as fault:
            text = f"Error: {fault.message}"
            detail = McpDetail(self.label, name, call.content, None, fault.message)
            yield ToolResult(call.recipient, text, True, detail)

    def _result(self, call: ToolCall, name: str, outcome: CallOutcome) -> ToolResult:
        text = outcome.text if outcome.text.strip() else _EMPTY
        output, error = (None, text) if outcome.is_error else (text, None)
        detail = McpDetail(self.label, name, call.content, output, error)
        return ToolResult(call.recipient, text, outcome.is_error, detail)

    async def aclose(self) -> None:
        await self._client.aclose()


def allowed(listing: McpListing, request: McpRequest) -> McpListing:
    """Returns the listing without tools that the request excludes and without duplicate names."""
    kept: dict[str, McpToolInfo] = {}
    for tool in listing.tools:
        if request.allowed_tools is not None and tool.name not in request.allowed_tools:
            continue
        if request.read_only and (tool.annotations or {}).get("readOnlyHint") is not True:
            continue
        kept.setdefault(safe_name(tool.name), tool)
    return McpListing(listing.server_label, tuple(kept.values()), listing.error)


def safe_name(name: str) -> str:
    """Converts a tool's name to a valid part of a harmony recipient."""
    return re.sub(r"[^A-Za-z0-9_-]", "_", name)[:64]


def _parameters(schema: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Returns the schema, or None without arguments, for which the model sees ``() => any``."""
    return schema if schema.get("properties") or schema.get("type") != "object" else None
