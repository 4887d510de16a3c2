"""HttpMiddleware: a single ASGI layer for request ids, limits, errors, the access log and HTTP metrics.

It is one layer because each wrapper of ``send`` costs time per streamed token. Its wrapper is a plain
function that returns the server's awaitable.
"""

from __future__ import annotations

import logging
import time
import urllib.parse
from collections.abc import Awaitable, Callable, Sequence

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.routing import BaseRoute, Match, Router
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from chorale.api.http.anthropic_errors import error_answer
from chorale.api.http.auth import HANDLER, OPEN_PATHS, request_id
from chorale.api.http.load_report import load_report
from chorale.api.http.request_limits import LimitedBody, check_head
from chorale.api.http.stream import KEEP_ALIVE
from chorale.api.state import ServerState
from chorale.api.telemetry.generation_span import CLIENT_LEFT as DISCONNECTED
from chorale.api.telemetry.request_trace import begin_request, end_request
from chorale.errors import (
    ChoraleError,
    EngineLoadingError,
    MethodNotAllowedError,
    NotFoundError,
    RequestError,
)
from chorale.tracing import ignored
from chorale.tracing.context import RequestContext
from chorale.tracing.otel import Span

logger = logging.getLogger(__name__)
access_logger = logging.getLogger("chorale.access")

Layer = Callable[[ASGIApp], ASGIApp]

CLIENT_LEFT = 499  # only in the log and metrics: no response was sent
SWITCHED = 101
_UNMATCHED = "none"
_HEADS = frozenset({"http.response.start", "websocket.http.response.start", "websocket.accept"})
# A browser must not run an answer that contains a user's text as a script.
_NOSNIFF = (b"x-content-type-options", b"nosniff")
_METHODS = frozenset({"GET", "POST", "DELETE", "HEAD", "OPTIONS", "PUT", "PATCH"})


class _Exchange:
    """One request and its response. For a WebSocket, only the handshake."""

    __slots__ = (
        "_send", "_state", "body", "context", "error", "id", "method", "scope", "started", "status",
    )  # fmt: skip

    def __init__(self, scope: Scope, body: LimitedBody, send: Send, state: ServerState) -> None:
        self.scope, self.body, self._send, self._state = scope, body, send, state
        self.id = request_id(scope)
        self.started = time.perf_counter()
        self.status = 0  # 0: nothing sent yet
        self.context: RequestContext | None = None
        self.error: str | None = None  # code of the error in the response
        self.method = scope["method"] if scope["method"] in _METHODS else "other"

    def send(self, message: Message) -> Awaitable[None]:
        if message["type"] in _HEADS:
            self.status = message.get("status", SWITCHED)
            elapsed = (time.perf_counter() - self.started) * 1000
            headers = [*message.get("headers", ()), (b"openai-processing-ms", b"%d" % elapsed), _NOSNIFF]
            if self._state.config.enable_request_id_headers:
                headers.append((b"x-request-id", self.id.encode("latin-1")))
            headers += load_report(self.scope, self.status, self._state.client)
            if names := ignored.header(self.context):
                headers.append((ignored.HEADER.encode(), names.encode()))
            if not self.body.complete and self.scope["method"] not in ("GET", "HEAD", "OPTIONS"):
                headers.append((b"connection", b"close"))  # the rest of the body is not read
            message = {**message, "headers": headers}
        return self._send(message)


class HttpMiddleware:
    """The ASGI middleware.

    ``cors`` wraps error responses too: without its headers a web page cannot read them.
    """

    def __init__(self, app: ASGIApp, state: ServerState, cors: Layer | None = None) -> None:
        self._app = app if cors is None else cors(app)
        self._cors = cors
        self.state = state  # used by the server to drain and shut down

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return await _lifespan(receive, send)
        config = self.state.config
        if config.root_path:  # remove the prefix if the proxy has not removed it
            scope["root_path"] = config.root_path.rstrip("/")
        body = LimitedBody(receive, scope, config)
        body.complete = scope["type"] == "websocket"  # ``websocket.py`` limits messages
        exchange = _Exchange(scope, body, send, self.state)
        scope[KEEP_ALIVE] = config.sse_keep_alive_interval
        scope.setdefault("state", {})["request_id"] = exchange.id
        scope["app"] = self  # Starlette's routes raise for a wrong method only inside an app
        counted = 0 if scope["type"] == "websocket" else 1  # an open WebSocket is not counted as a request
        self.state.lifecycle.num_requests += counted
        exchange.context = begin_request(self.state, scope, exchange.id) if counted else None
        try:
            await self._answer(exchange)
        finally:
            self.state.lifecycle.num_requests -= counted
            self._record(exchange)

    async def _answer(self, exchange: _Exchange) -> None:
        try:
            check_head(exchange.scope, self.state.config, self.state.has_keys)
            await self._app(exchange.scope, exchange.body, exchange.send)
        except ClientDisconnect:
            exchange.status = exchange.status or CLIENT_LEFT
            exchange.error = DISCONNECTED
        except ChoraleError as error:
            await self._fail(exchange, error)
        except HTTPException as error:
            failure = _from_starlette(error).with_traceback(error.__traceback__)
            await self._fail(exchange, failure, dict(error.headers or {}))
        except Exception:
            logger.exception("request %s failed", exchange.id)
            await self._fail(exchange, ChoraleError(f"internal error (request {exchange.id})"))

    async def _fail(
        self, exchange: _Exchange, error: ChoraleError, headers: dict[str, str] | None = None
    ) -> None:
        exchange.error = error.code
        # An unexpected exception has been logged with its own trace.
        if self.state.config.log_error_stack and error.__traceback__ is not None:
            logger.error("request %s gets an error: %s", exchange.id, error, exc_info=error)
        if exchange.status:
            # On a WebSocket this ends the connection.
            logger.error("request %s failed after its response had started: %s", exchange.id, error)
            return
        if error.status != 408 and not _expects_continue(exchange.scope):
            await exchange.body.discard()
        response = error_answer(error, exchange.scope, exchange.id)
        response.headers.update(headers or {})
        # The CORS layer would answer a refused preflight request itself, hiding the error.
        cors = self._cors if exchange.method != "OPTIONS" else None
        answer = response if cors is None else cors(response)
        await answer(exchange.scope, exchange.body, exchange.send)

    def _record(self, exchange: _Exchange) -> None:
        context = exchange.context
        elapsed = time.perf_counter() - exchange.started
        status = exchange.status or CLIENT_LEFT
        handler = exchange.scope.get(HANDLER, _UNMATCHED)
        if status != SWITCHED:
            self.state.metrics.http_finished(handler, exchange.method, status, elapsed)
        if context is not None and handler not in OPEN_PATHS:
            end_request(self.state, context, handler, status, exchange.error)
        if self.state.config.access_log:
            # Clients that wait for the model would bury the log of the start.
            is_noise = handler in OPEN_PATHS or exchange.error == EngineLoadingError.default_code
            level = logging.DEBUG if is_noise else logging.INFO
            if access_logger.isEnabledFor(level):
                _log_access(level, exchange, status, elapsed, None if context is None else context.span)


def _log_access(level: int, exchange: _Exchange, status: int, elapsed: float, span: Span | None) -> None:
    fields = {
        "client": (exchange.scope.get("client") or ("-",))[0],
        "method": exchange.method,
        # Escaped, since a path may contain control characters.
        "path": ascii(exchange.scope["path"])[1:-1][:200],
        "status": status,
        "duration_ms": round(elapsed * 1000, 1),
        "request_id": exchange.id,
    }
    form = "%(client)s %(method)s %(path)s %(status)d %(duration_ms).1fms id=%(request_id)s"
    if span is None:
        access_logger.log(level, form, fields, extra={"fields": fields})
    else:
        own = fields | {"span_id": span.span_id}
        access_logger.log(level, f"{form} trace={span.trace_id}", fields, extra={"fields": own})


async def _lifespan(receive: Receive, send: Send) -> None:
    """Acknowledges the lifespan messages. The state is created before the app and outlives it."""
    while True:
        kind = (await receive())["type"]
        await send({"type": f"{kind}.complete"})
        if kind == "lifespan.shutdown":
            return


def _expects_continue(scope: Scope) -> bool:
    return any(name == b"expect" for name, _ in scope["headers"])


def _from_starlette(error: HTTPException) -> ChoraleError:
    if error.status_code == 405:
        return MethodNotAllowedError("method not allowed for this path")
    if error.status_code == 404:
        return NotFoundError("unknown path", code="unknown_url")
    return RequestError(error.detail)


class Routes(Router):
    """Starlette's router, which redirects a path with a trailing slash to the path without it.

    The root is redirected to the path with a slash, because the links of the chat page are relative.
    """

    def __init__(self, routes: Sequence[BaseRoute]) -> None:
        super().__init__(routes, redirect_slashes=False, default=unknown_path)

    async def app(self, scope: Scope, receive: Receive, send: Send) -> None:
        location = self._moved(scope) if scope["type"] == "http" else None
        if location is None:
            return await super().app(scope, receive, send)
        if isinstance(receive, LimitedBody):
            await receive.discard()
        return await Response(status_code=307, headers={"location": location})(scope, receive, send)

    def _moved(self, scope: Scope) -> str | None:
        path: str = scope["path"]
        if path == scope.get("root_path"):
            return urllib.parse.quote(path) + "/"
        if not path.endswith("/") or not path.strip("/"):
            return None
        bare = {**scope, "path": path.rstrip("/")}
        if all(route.matches(bare)[0] is Match.NONE for route in self.routes):
            return None
        root = scope.get("root_path", "")
        if not bare["path"].startswith(root):
            bare["path"] = root + bare["path"]  # the client needs the prefix that the proxy removed
        query = scope["query_string"].decode("latin-1")
        return urllib.parse.quote(bare["path"], safe="/:@!$&'()*+,;=~") + (f"?{query}" if query else "")


async def unknown_path(scope: Scope, receive: Receive, send: Send) -> None:
    """Handles requests that match no route."""
    path = scope["path"][:200]
    hint = ""
    if path.startswith("/v1/v1/"):
        hint = " The client adds /v1 itself: its base URL must not end in /v1."
    elif not path.startswith("/v1/"):
        hint = " The base URL of an OpenAI client must end in /v1."
    raise NotFoundError(
        f"Unknown request URL: {scope['method']} {path}.{hint} See /docs.", code="unknown_url"
    )
