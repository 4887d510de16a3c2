"""The tools of one response. Routes each call to the tool of its recipient. Implements ``ToolBox``."""

from __future__ import annotations

import contextlib
import difflib
import logging
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

from chorale.harmony.messages import ToolNamespace
from chorale.tools.browser.citations import CitationRewriter
from chorale.tools.contract import (
    CitationStream,
    Link,
    McpListing,
    Progress,
    SystemTool,
    ToolCall,
    ToolIdentity,
    ToolResult,
    failed_result,
)
from chorale.tools.mcp.toolset import McpToolset

logger = logging.getLogger(__name__)


class Box:
    """``system``: the tools of the namespaces ``browser`` and ``python``, as far as there are."""

    def __init__(
        self,
        system: Mapping[str, SystemTool],
        toolsets: Sequence[McpToolset],
        listings: Sequence[McpListing],
    ) -> None:
        self.listings = tuple(listings)
        self._system = system
        self._toolsets = {toolset.name: toolset for toolset in toolsets}

    @property
    def system_namespaces(self) -> tuple[ToolNamespace, ...]:
        return tuple(tool.namespace for tool in self._system.values())

    @property
    def developer_namespaces(self) -> tuple[ToolNamespace, ...]:
        return tuple(toolset.namespace for toolset in self._toolsets.values() if toolset.recipients)

    @property
    def recipients(self) -> frozenset[str]:
        return frozenset(name for tool in self._tools() for name in tool.recipients)

    def _tools(self) -> list[SystemTool | McpToolset]:
        return [*self._system.values(), *self._toolsets.values()]

    @property
    def container_id(self) -> str | None:
        python = self._system.get("python")
        return None if python is None else python.container_id

    def owns(self, recipient: str) -> bool:
        name = recipient.partition(".")[0]
        return name in self._system or name in self._toolsets

    def identify(self, recipient: str) -> ToolIdentity:
        name, _, tool = recipient.partition(".")
        if name == "python" and name in self._system:
            return ToolIdentity("python", "python", "python")
        if name in self._system:
            return ToolIdentity("browser", "browser", tool)
        toolset = self._toolsets[name]
        return ToolIdentity("mcp", toolset.label, toolset.real_name(tool), toolset.needs_approval(tool))

    async def call(self, call: ToolCall) -> AsyncGenerator[Progress | ToolResult, None]:
        name = call.recipient.partition(".")[0]
        if name == "python" and name in self._system:
            call = ToolCall("python", call.content, call.call_id)  # the recipient may be "python.run"
        elif call.recipient not in self.recipients:
            yield self._unknown(call)
            return
        tool = self._system.get(name) or self._toolsets[name]
        try:
            async with contextlib.aclosing(tool.call(call)) as events:
                async for event in events:
                    yield event
        except Exception as error:  # a bug: the response continues, and the log has the traceback
            logger.exception("the tool %s failed", call.recipient)
            yield self._broken(call, f"Error: the tool failed ({type(error).__name__})")

    def _unknown(self, call: ToolCall) -> ToolResult:
        near = difflib.get_close_matches(call.recipient, sorted(self.recipients), n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        there = ", ".join(sorted(self.recipients)[:40]) or "none"
        return self._broken(call, f"Error: there is no tool {call.recipient[:128]}{hint} Available: {there}.")

    def _broken(self, call: ToolCall, text: str) -> ToolResult:
        return failed_result(self.identify(call.recipient), call, text, text)

    def citation_stream(self) -> CitationStream:
        browser = self._system.get("browser")
        return CitationRewriter(browser.cited if browser is not None else _nothing_cited)

    def state(self) -> dict[str, Any]:
        return {name: tool.state() for name, tool in self._system.items()}

    async def aclose(self) -> None:
        for tool in self._tools():
            with contextlib.suppress(OSError):
                await tool.aclose()


def _nothing_cited(_cursor: int, _line: int | None) -> Link | None:
    return None
