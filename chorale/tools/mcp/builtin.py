"""Browser and python tools on MCP servers, presented to the model as the built-in tools.

By vLLM's convention, a ``--tool-server`` whose ``serverInfo.name`` is "browser" or "python" replaces the
built-in tool. Its tools receive the model's arguments unchanged; python receives ``{"code"}``.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncGenerator, Mapping
from typing import Any

from chorale.harmony.builtin_tools import browser_tools, python_tool
from chorale.harmony.messages import ToolNamespace
from chorale.tools.arguments import Arguments, parse_object
from chorale.tools.contract import (
    BrowserAction,
    CodeOutput,
    CodeStarted,
    FindAction,
    Link,
    OpenPageAction,
    Progress,
    PythonDetail,
    SearchAction,
    Source,
    SystemTool,
    ToolCall,
    ToolResult,
)
from chorale.tools.errors import ToolError
from chorale.tools.mcp.client import CallOutcome, McpClient

_HEADER = re.compile(r"\A\s*\[(\d{1,9})\] (.*?)(?: \((\S+)\))?\n\*\*viewing lines ")
_MARK = re.compile(r"【(\d{1,9})†([^†【】]{1,300})(?:†([^†【】]{1,300}))?】")
_MAX_CURSORS = 256


CLEANUP = "cleanup_session"


class _Remote(SystemTool):
    """A tool on an MCP server. ``cleans_up``: the server lists ``cleanup_session`` (vLLM's convention)."""

    def __init__(self, client: McpClient, cleans_up: bool) -> None:
        self._client = client
        self._cleans_up = cleans_up

    async def aclose(self) -> None:
        if self._cleans_up and self._client.connected:
            with contextlib.suppress(ToolError, TimeoutError):
                async with asyncio.timeout(5):
                    await self._client.outcome(CLEANUP, {}, CLEANUP)
        await self._client.aclose()


class RemotePython(_Remote):
    """python on an MCP server.

    ``container_id`` identifies the session in the API, ``x-session-id`` to the server.
    """

    def __init__(
        self, client: McpClient, container_id: str, instructions: str, *, cleans_up: bool = False
    ) -> None:
        super().__init__(client, cleans_up)
        self.container_id = container_id
        self.namespace = ToolNamespace("python", instructions or python_tool(stateful=True).description)
        self.recipients = frozenset({"python"})

    async def call(self, call: ToolCall) -> AsyncGenerator[Progress | ToolResult, None]:
        yield CodeStarted(self.container_id)
        try:
            outcome = await self._client.outcome("python", {"code": call.content}, call.call_id)
            text, failed = outcome.text, outcome.is_error
        except ToolError as fault:
            text, failed = f"Error: {fault.message}", True
        if text:
            yield CodeOutput(text)
        yield ToolResult(
            "python", text or "[no output]", failed, PythonDetail(self.container_id, call.content, text)
        )

    def state(self) -> Any:
        return {"container": self.container_id}


class RemoteBrowser(_Remote):
    """The browser on an MCP server. Parses the address of each cursor from the displays, for citations."""

    def __init__(self, client: McpClient, state: Any, *, cleans_up: bool = False) -> None:
        super().__init__(client, cleans_up)
        self.namespace = browser_tools()
        self.recipients = frozenset(f"browser.{tool.name}" for tool in self.namespace.tools)
        self._cursors: dict[int, Link] = {}
        self._current = -1
        if isinstance(state, Mapping):
            for cursor, url, title in list(state.get("cursors") or ())[:_MAX_CURSORS]:
                self._remember(int(cursor), Link(str(url), str(title)))

    async def call(self, call: ToolCall) -> AsyncGenerator[Progress | ToolResult, None]:
        verb = call.recipient.partition(".")[2]
        action = self._action(verb, call.content)
        yield action
        try:
            outcome = await self._client.outcome(verb, parse_object(call.content), call.call_id)
        except ToolError as fault:
            yield ToolResult(call.recipient, f"Error: {fault.message}", True, action)
        else:
            action = self._after(action, outcome)
            text = outcome.text or "[the browser returned nothing]"
            yield ToolResult(call.recipient, text, outcome.is_error, action)

    def cited(self, cursor: int, line: int | None) -> Link | None:
        return self._cursors.get(cursor)

    def state(self) -> Any:
        return {"cursors": [[cursor, link.url, link.title] for cursor, link in self._cursors.items()]}

    # ------------------------------------------------------------------ reading arguments and displays

    def _action(self, verb: str, content: str) -> BrowserAction:
        try:
            arguments = Arguments.read(content)
            cursor = arguments.number("cursor", -1)
        except ToolError:
            arguments, cursor = Arguments({}), -1
        link = self._cursors.get(self._current if cursor < 0 else cursor)
        url = link.url if link is not None else None
        if verb == "search":
            return SearchAction(str(arguments.raw("query", ""))[:2000])
        if verb == "find":
            return FindAction(str(arguments.raw("pattern", ""))[:1000], url)
        where = arguments.raw("id", -1)
        return OpenPageAction(where if isinstance(where, str) and "://" in where else url)

    def _after(self, action: BrowserAction, outcome: CallOutcome) -> BrowserAction:
        """Completes the action from the outcome: the sources of a search, the address of a page."""
        header = _HEADER.match(outcome.text)
        if header is not None:
            link = Link(header.group(3) or "", header.group(2))
            if "://" in link.url or not link.url:
                self._remember(int(header.group(1)), link)
            if isinstance(action, OpenPageAction) and link.url:
                return OpenPageAction(link.url)
        if isinstance(action, SearchAction):
            return SearchAction(action.query, _sources(outcome))
        return action

    def _remember(self, cursor: int, link: Link) -> None:
        if len(self._cursors) < _MAX_CURSORS or cursor in self._cursors:
            self._cursors[cursor] = link
            self._current = cursor


def _sources(outcome: CallOutcome) -> tuple[Source, ...]:
    """Returns the sources of a search. Servers other than Chorale's report only titles and domains."""
    told = outcome.meta.get("sources")
    if isinstance(told, list):
        records = [r for r in told if isinstance(r, dict) and isinstance(r.get("url"), str)]
        return tuple(
            Source(r["url"], str(r.get("title", "")), str(r.get("snippet", ""))) for r in records[:20]
        )
    marks = _MARK.findall(outcome.text)
    return tuple(Source(f"https://{domain}", title) for _, title, domain in marks[:20] if domain)
