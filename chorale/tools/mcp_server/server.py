"""The browser and python tools as MCP servers for other engines: the protocol without HTTP.

The client determines the session (``x-session-id``, else the streamable HTTP session). Each
session has its own cursors or interpreter. It ends when it is closed, idle, or displaced by newer ones.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, Mapping
from typing import Any, Literal

from chorale.tools.contract import (
    CodeInterpreterRequest,
    CodeOutput,
    RequestTools,
    SearchAction,
    ToolBox,
    ToolCall,
    ToolResult,
    ToolService,
    WebSearchRequest,
)
from chorale.tools.mcp.wire import (
    INVALID_PARAMS,
    INVALID_REQUEST,
    METHOD_NOT_FOUND,
    VERSIONS,
    Message,
    failure,
    notification,
    success,
)
from chorale.version import __version__

ServerName = Literal["browser", "python"]
_MAX_SESSIONS = 256
_IDLE_SECONDS = 1800.0


class _Session:
    def __init__(self, box: ToolBox) -> None:
        self.box = box
        self.used = time.monotonic()
        # Calls of a session run one at a time, since they share cursors or variables.
        self.lock = asyncio.Lock()


class ToolServer:
    """An MCP server. ``answer`` takes a JSON-RPC message and yields the replies, the response last."""

    def __init__(self, name: ServerName, service: ToolService) -> None:
        self.name = name
        self._service = service
        self._sessions: OrderedDict[str, _Session] = OrderedDict()
        self._opening = asyncio.Lock()

    async def answer(self, message: Message, session: str) -> AsyncGenerator[Message, None]:
        """Yields the replies to a message, none for a notification."""
        number, method = message.get("id"), message.get("method")
        params = message.get("params")
        params = params if isinstance(params, dict) else {}
        if number is None or method is None:
            return
        if not isinstance(method, str):
            yield failure(number, INVALID_REQUEST, "the method must be a string")
        elif method == "initialize":
            yield success(number, await self._initialize(params, session))
        elif method == "ping":
            yield success(number, {})
        elif method == "tools/list":
            yield success(number, {"tools": await self._tools(session)})
        elif method == "tools/call":
            async with contextlib.aclosing(self._call(number, params, session)) as messages:
                async for item in messages:
                    yield item
        elif method in ("resources/list", "prompts/list", "resources/templates/list"):
            key = {"resources/list": "resources", "prompts/list": "prompts"}.get(method, "resourceTemplates")
            yield success(number, {key: []})
        else:
            yield failure(number, METHOD_NOT_FOUND, f"unknown method {method[:80]}")

    # ------------------------------------------------------------------ methods

    async def _initialize(self, params: Mapping[str, Any], session: str) -> dict[str, Any]:
        wanted = params.get("protocolVersion")
        namespace = (await self._open(session)).box.system_namespaces[0]
        return {
            "protocolVersion": wanted if wanted in VERSIONS else VERSIONS[0],
            "capabilities": {"tools": {"listChanged": False}},
            "serverInfo": {"name": self.name, "version": __version__},
            "instructions": namespace.description or "",
        }

    async def _tools(self, session: str) -> list[dict[str, Any]]:
        if self.name == "python":
            return [_PYTHON]
        namespace = (await self._open(session)).box.system_namespaces[0]
        return [
            {"name": tool.name, "description": tool.description, "inputSchema": dict(tool.parameters or {})}
            for tool in namespace.tools
        ]

    async def _call(
        self, number: Any, params: Mapping[str, Any], session: str
    ) -> AsyncGenerator[Message, None]:
        name, arguments = params.get("name"), params.get("arguments") or {}
        call = self._tool_call(name, arguments, str(number))
        if call is None:
            yield failure(
                number, INVALID_PARAMS, f"unknown tool {str(name)[:80]}, or its arguments are not an object"
            )
            return
        meta = params.get("_meta")
        token = meta.get("progressToken") if isinstance(meta, dict) else None
        opened = await self._open(session)
        count = 0
        async with opened.lock, contextlib.aclosing(opened.box.call(call)) as events:
            async for event in events:
                if isinstance(event, ToolResult):
                    yield success(number, _result(event))
                elif token is not None:
                    count += 1
                    text = event.text if isinstance(event, CodeOutput) else type(event).__name__
                    note = {"progressToken": token, "progress": count, "message": text[:1000]}
                    yield notification("notifications/progress", note)
        opened.used = time.monotonic()

    def _tool_call(self, name: Any, arguments: Any, call_id: str) -> ToolCall | None:
        if not isinstance(arguments, dict):
            return None
        if self.name == "python":
            code = arguments.get("code")
            return ToolCall("python", code, call_id) if name == "python" and isinstance(code, str) else None
        if name not in ("search", "open", "find"):
            return None
        return ToolCall(f"browser.{name}", json.dumps(arguments), call_id)

    # ------------------------------------------------------------------ sessions

    async def _open(self, key: str) -> _Session:
        async with self._opening:
            await self._sweep()
            found = self._sessions.get(key)
            if found is None:
                browser = WebSearchRequest() if self.name == "browser" else None
                python = CodeInterpreterRequest() if self.name == "python" else None
                request = RequestTools(web_search=browser, code_interpreter=python)
                found = _Session(await self._service.open(request, session_key=key))
                self._sessions[key] = found
            self._sessions.move_to_end(key)
            found.used = time.monotonic()
            return found

    async def _sweep(self) -> None:
        """Ends idle sessions and, above the limit, the least recently used; never one with a running call."""
        limit = time.monotonic() - _IDLE_SECONDS
        for key, session in list(self._sessions.items()):
            too_many = len(self._sessions) > _MAX_SESSIONS
            if session.lock.locked() or not (too_many or session.used < limit):
                continue
            del self._sessions[key]
            await session.box.aclose()

    async def end(self, key: str) -> None:
        session = self._sessions.pop(key, None)
        if session is not None:
            await session.box.aclose()

    async def aclose(self) -> None:
        for key in list(self._sessions):
            await self.end(key)


_HIDDEN = {"include_in_prompt": False}  # vLLM: describe the namespace by its instructions alone
_PYTHON: dict[str, Any] = {
    "name": "python",
    "description": "Runs Python code in this session's interpreter and returns what it prints.",
    "inputSchema": {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]},
    "annotations": _HIDDEN,
    "_meta": _HIDDEN,
}


def _result(result: ToolResult) -> dict[str, Any]:
    """Returns the MCP result. ``_meta.sources`` lists search results, for clients with citations."""
    body: dict[str, Any] = {"content": [{"type": "text", "text": result.content}], "isError": result.failed}
    detail = result.detail
    if isinstance(detail, SearchAction) and not result.failed:
        sources = [{"url": s.url, "title": s.title, "snippet": s.snippet} for s in detail.sources]
        body["_meta"] = {"sources": sources}
    return body
