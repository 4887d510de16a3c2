"""HTTP endpoints of a ``ToolServer``: streamable HTTP at /mcp and /health.

On a loopback address it accepts only local host names and origins: DNS rebinding in a browser must not give
access to an interpreter.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import secrets
from collections.abc import AsyncGenerator, AsyncIterator
from functools import partial
from urllib.parse import urlsplit

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from chorale.tools.errors import ToolError
from chorale.tools.mcp.wire import INVALID_REQUEST, PARSE_ERROR, Message, decode, encode, failure
from chorale.tools.mcp_server.server import ToolServer

_MAX_BODY = 2 * 2**20
_LOCAL = ("localhost", "127.0.0.1", "::1", "[::1]")


def create_app(server: ToolServer, *, host: str, key: str | None) -> ASGIApp:
    """Builds the app. ``host``: its listening address. ``key``: the bearer token that clients must send."""
    app = Starlette(
        routes=[
            Route("/mcp", partial(_streamable, server), methods=["POST", "GET", "DELETE"]),
            Route("/health", _health, methods=["GET"]),
        ]
    )
    return _AccessCheck(app, local=host in _LOCAL, key=key)


async def _health(_request: Request) -> Response:
    return Response()


class _AccessCheck:
    """Checks the key and, on a loopback address, that host name and origin are local."""

    def __init__(self, app: ASGIApp, *, local: bool, key: str | None) -> None:
        self._app = app
        self._local = local
        self._digest = hashlib.sha256(key.encode()).digest() if key else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            request = Request(scope)
            refusal = self._refusal(request)
            if refusal is not None:
                await refusal(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _refusal(self, request: Request) -> Response | None:
        if self._local:
            origin = request.headers.get("origin")
            names = [_hostname(f"//{request.headers.get('host', '')}")]
            names += [_hostname(origin)] if origin is not None else []
            if any(name not in ("localhost", "127.0.0.1", "::1") for name in names):
                return Response("this server accepts local host names only", 403)
        if self._digest is not None and request.url.path != "/health":
            given = request.headers.get("authorization", "").removeprefix("Bearer ")
            if not hmac.compare_digest(hashlib.sha256(given.encode()).digest(), self._digest):
                return Response("a bearer token is required", 401, {"www-authenticate": "Bearer"})
        return None


def _hostname(url: str) -> str | None:
    try:
        return urlsplit(url).hostname
    except ValueError:
        return None


async def _streamable(server: ToolServer, request: Request) -> Response:
    if request.method == "GET":
        return Response("this server offers no GET stream", 405, {"allow": "POST, DELETE"})
    session = request.headers.get("mcp-session-id", "")
    if request.method == "DELETE":
        if "x-session-id" not in request.headers:  # a named session outlives its connection
            await server.end(_session(request, session))
        return Response(status_code=204)
    message = await _read(request)
    if isinstance(message, Response):
        return message
    headers = {}
    if message.get("method") == "initialize":
        session = secrets.token_hex(16)
        headers["mcp-session-id"] = session
    if message.get("id") is None or message.get("method") is None:
        return Response(status_code=202)
    answers = server.answer(message, _session(request, session))
    if message["method"] == "tools/call" and "text/event-stream" in request.headers.get("accept", ""):
        return StreamingResponse(_as_events(answers), media_type="text/event-stream", headers=headers)
    messages = [answer async for answer in answers]
    return Response(encode(messages[-1]), 200, headers, "application/json")


async def _read(request: Request) -> Message | Response:
    """Reads one message from a body of limited size. Returns it or an error response."""
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > _MAX_BODY:
            return Response("the body is too large", 413)
    try:
        messages = decode(body)
    except ToolError:
        return JSONResponse(failure(None, PARSE_ERROR, "the body is not JSON-RPC"), 400)
    if len(messages) != 1:
        return JSONResponse(failure(None, INVALID_REQUEST, "send one message at a time"), 400)
    return messages[0]


def _session(request: Request, otherwise: str) -> str:
    """Returns the session: the one named in vLLM's ``x-session-id`` header, else that of the connection."""
    named = request.headers.get("x-session-id")
    return f"named {named[:256]}" if named else f"own {otherwise}"


async def _as_events(answers: AsyncGenerator[Message, None]) -> AsyncIterator[bytes]:
    async with contextlib.aclosing(answers):
        async for answer in answers:
            yield _event(answer)


def _event(message: Message) -> bytes:
    return b"event: message\ndata: " + encode(message) + b"\n\n"
