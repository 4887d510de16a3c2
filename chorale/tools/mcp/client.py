"""A session with an MCP server: handshake, list of tools and calls, with limits on time, size and number."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from chorale.machine.tasks import end_tasks
from chorale.tools.contract import McpProgress, McpToolInfo
from chorale.tools.errors import deadline
from chorale.tools.mcp.transport import NotThisTransport, Transport
from chorale.tools.mcp.wire import VERSIONS, McpError, Message, notification, request, result_of
from chorale.tracing.context import outgoing_headers
from chorale.version import __version__

_MAX_PAGES = 20
_MAX_NOTES = 256  # progress that is kept until the caller reads it
_MAX_NUMBER = 2.0**53  # limit of progress values; others are ignored


@dataclass(frozen=True, slots=True, kw_only=True)
class McpLimits:
    """Limits for an untrusted server, in seconds, bytes and counts."""

    connect_seconds: float = 10.0  # for the handshake and the list of tools together
    call_seconds: float = 60.0
    max_tools: int = 128
    max_schema_bytes: int = 32 * 1024  # schema of one tool
    max_listing_bytes: int = 256 * 1024  # all schemas and descriptions together
    max_description_len: int = 4096
    max_result_len: int = 64 * 1024  # characters shown to the model


@dataclass(frozen=True, slots=True)
class CallOutcome:
    text: str
    is_error: bool
    meta: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ServerInfo:
    name: str
    instructions: str


class McpClient:
    """A client that tries ``transports`` in order until the server supports one."""

    def __init__(self, transports: list[Callable[[], Transport]], limits: McpLimits) -> None:
        self._makers = transports
        self._limits = limits
        self._numbers = itertools.count(1)
        self._transport: Transport | None = None
        self.info = ServerInfo("", "")

    @property
    def connected(self) -> bool:
        return self._transport is not None

    async def connect(self) -> None:
        """Connects. On failure closes the client and raises ``McpError``."""
        seconds = self._limits.connect_seconds
        try:
            async with deadline(seconds, McpError(f"no handshake within {seconds:g} s")):
                await self._connect()
        except BaseException:
            await self.aclose()
            raise

    async def _connect(self) -> None:
        for number, make in enumerate(self._makers, 1):
            self._transport = make()
            try:
                await self._initialize(self._transport)
            except NotThisTransport:
                if number == len(self._makers):
                    raise
                await self.aclose()
            else:
                return

    async def _initialize(self, transport: Transport) -> None:
        hello = {
            "protocolVersion": VERSIONS[0],
            "capabilities": {},
            "clientInfo": {"name": "chorale", "version": __version__},
        }
        answer = result_of(
            await transport.request(request(next(self._numbers), "initialize", hello), _ignore)
        )
        version = answer.get("protocolVersion")
        if version not in VERSIONS:
            raise McpError(f"the server supports only revision {str(version)[:40]!r} of the protocol")
        transport.agreed(str(version))
        named = answer.get("serverInfo")
        name = named.get("name") if isinstance(named, dict) else None
        instructions = answer.get("instructions")
        self.info = ServerInfo(
            str(name or "")[:128],
            instructions[: self._limits.max_description_len] if isinstance(instructions, str) else "",
        )
        await transport.notify(notification("notifications/initialized"))

    async def list_tools(self) -> tuple[McpToolInfo, ...]:
        """Returns the tools with usable names and schemas, in the server's order. Raises ``McpError``."""
        seconds = self._limits.connect_seconds
        async with deadline(seconds, McpError(f"no list of tools within {seconds:g} s")):
            return await self._list_tools()

    async def _list_tools(self) -> tuple[McpToolInfo, ...]:
        found: dict[str, McpToolInfo] = {}
        room = self._limits.max_listing_bytes
        cursor: str | None = None
        for _ in range(_MAX_PAGES):
            params = {"cursor": cursor} if cursor is not None else {}
            answer = result_of(await self._request("tools/list", params, _ignore))
            records = answer.get("tools")
            for record in records if isinstance(records, list) else ():
                tool = read_tool(record, self._limits)
                if tool is None or tool.name in found:
                    continue
                room -= len(json.dumps(tool.input_schema)) + len(tool.description or "")
                if room < 0 or len(found) >= self._limits.max_tools:
                    raise McpError(
                        f"the server lists more than {self._limits.max_tools} tools or "
                        f"{self._limits.max_listing_bytes} bytes of them; use allowed_tools or another server"
                    )
                found[tool.name] = tool
            cursor = answer.get("nextCursor")
            if not isinstance(cursor, str) or not cursor:
                return tuple(found.values())
        raise McpError(f"the list of tools has more than {_MAX_PAGES} pages")

    async def outcome(self, name: str, arguments: Mapping[str, Any], token: str) -> CallOutcome:
        """Runs a tool without its progress. Raises ``McpError``."""
        async with contextlib.aclosing(self.run(name, arguments, token)) as items:
            async for item in items:
                if isinstance(item, CallOutcome):
                    return item
        raise McpError("the call ended without an outcome")

    async def run(
        self, name: str, arguments: Mapping[str, Any], token: str
    ) -> AsyncGenerator[McpProgress | CallOutcome, None]:
        """Calls a tool, and yields its progress, then its outcome. Raises ``McpError``.

        Connects first if necessary. After an ``McpError`` the next call connects again.
        """
        notes: asyncio.Queue[McpProgress | None] = asyncio.Queue()  # None: the call has ended

        def on_note(message: Message) -> None:
            progress = read_progress(message)
            if progress is not None and notes.qsize() < _MAX_NOTES:
                notes.put_nowait(progress)

        meta = {"progressToken": token, **outgoing_headers()}  # traceparent, since stdio has no headers
        params = {"name": name, "arguments": dict(arguments), "_meta": meta}
        task = asyncio.create_task(self._call(params, on_note))
        task.add_done_callback(lambda _: notes.put_nowait(None))
        try:
            while (note := await notes.get()) is not None:
                yield note
            yield read_outcome(task.result(), self._limits)
        except McpError:
            await self.aclose()
            raise
        finally:
            await end_tasks(task)

    async def _call(self, params: Mapping[str, Any], on_note: Callable[[Message], None]) -> dict[str, Any]:
        if not self.connected:
            await self.connect()
        seconds = self._limits.call_seconds
        async with deadline(seconds, McpError(f"no answer within {seconds:g} s")):
            return result_of(await self._request("tools/call", params, on_note))

    async def _request(
        self, method: str, params: Mapping[str, Any], on_note: Callable[[Message], None]
    ) -> Message:
        if self._transport is None:
            raise McpError("the connection to the server is closed")
        return await self._transport.request(request(next(self._numbers), method, params), on_note)

    async def aclose(self) -> None:
        transport, self._transport = self._transport, None
        if transport is not None:
            await transport.aclose()


def _ignore(_message: Message) -> None:
    """Ignores notifications outside a call."""


def read_tool(record: Any, limits: McpLimits) -> McpToolInfo | None:
    """Parses a tool. Returns None without a name or an object schema, or if the schema is too large."""
    if not isinstance(record, dict) or not isinstance(record.get("name"), str) or not record["name"]:
        return None
    schema = record.get("inputSchema")
    schema = schema if isinstance(schema, dict) else {"type": "object", "properties": {}}
    if len(record["name"]) > 128 or len(json.dumps(schema)) > limits.max_schema_bytes:
        return None
    description = record.get("description")
    hints: dict[str, Any] = {}
    # SDK 2.x keeps unknown hints in _meta only.
    for source in (record.get("annotations"), record.get("_meta")):
        if isinstance(source, dict) and len(json.dumps(source)) < 4096:
            hints |= source
    return McpToolInfo(
        record["name"],
        description[: limits.max_description_len] if isinstance(description, str) else None,
        schema,
        hints or None,
    )


def read_progress(message: Message) -> McpProgress | None:
    params = message.get("params")
    if not isinstance(params, dict):
        return None
    if message.get("method") == "notifications/progress":
        text = params.get("message")
        return McpProgress(
            str(text)[:1000] if text is not None else "",
            _number(params.get("progress")),
            _number(params.get("total")),
        )
    if message.get("method") == "notifications/message":
        return McpProgress(str(params.get("data", ""))[:1000])
    return None


def _number(value: Any) -> float | None:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not abs(value) < _MAX_NUMBER:
        return None
    return float(value)


def read_outcome(result: Mapping[str, Any], limits: McpLimits) -> CallOutcome:
    """Joins the parts of a result into one text, with a note for parts that are not text."""
    parts = result.get("content")
    texts = [_part(part) for part in parts if isinstance(part, dict)] if isinstance(parts, list) else []
    structured = result.get("structuredContent")
    if not any(texts) and structured is not None:
        texts = [json.dumps(structured, ensure_ascii=False)]
    text = "\n".join(text for text in texts if text)
    if len(text) > limits.max_result_len:
        left_out = len(text) - limits.max_result_len
        text = f"{text[: limits.max_result_len]}\n[{left_out} characters left out]"
    meta = result.get("_meta")
    return CallOutcome(text, result.get("isError") is True, meta if isinstance(meta, dict) else {})


def _part(part: Mapping[str, Any]) -> str:
    kind = part.get("type")
    if kind == "text":
        return str(part.get("text", ""))
    if kind in ("image", "audio"):
        return f"[{kind} of type {str(part.get('mimeType'))[:80]}: not shown]"
    if kind == "resource_link":
        return f"[{str(part.get('name', ''))[:200]}]({str(part.get('uri', ''))[:2000]})"
    resource = part.get("resource")
    if kind == "resource" and isinstance(resource, dict):
        shown = resource.get("text")
        return str(shown) if shown is not None else f"[resource {str(resource.get('uri'))[:2000]}: not shown]"
    return f"[content of type {str(kind)[:80]}: not shown]"
