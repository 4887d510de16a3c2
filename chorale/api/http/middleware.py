"""HttpMiddleware: the one ASGI layer around every request: id, limits, errors, access log, HTTP metrics.

One layer, not five, because each wrapper of ``send`` is paid for with every streamed token; this one's is
a plain function that hands the server's own awaitable through.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from chorale.api.http.anthropic_errors import error_answer
from chorale.api.http.auth import HANDLER, OPEN_PATHS, request_id
from chorale.api.http.request_limits import LimitedBody, check_head
from chorale.api.state import ServerState
from chorale.errors import ChoraleError, MethodNotAllowedError, NotFoundError, RequestError

logger = logging.getLogger(__name__)
access_logger = logging.getLogger("chorale.access")

Layer = Callable[[ASGIApp], ASGIApp]

CLIENT_LEFT = 499  # in the log and the metrics only: nothing was sent
SWITCHED = 101
_UNMATCHED = "none"
_HEADS = frozenset({"http.response.start", "websocket.http.response.start", "websocket.accept"})
_METHODS = frozenset({"GET", "POST", "DELETE", "HEAD", "OPTIONS", "PUT", "PATCH"})


class _Exchange:
    """One request and what was answered. A WebSocket handshake is one; what follows it is not."""

    __slots__ = ("_echo_id", "_send", "body", "id", "method", "scope", "started", "status")

    def __init__(self, scope: Scope, body: LimitedBody, send: Send, echo_id: bool) -> None:
        self.scope, self.body, self._send, self._echo_id = scope, body, send, echo_id
        self.id = request_id(scope)
        self.started = time.perf_counter()
        self.status = 0  # nothing sent yet
        self.method = scope["method"] if scope["method"] in _METHODS else "other"

    def send(self, message: Message) -> Awaitable[None]:
        if message["type"] in _HEADS:
            self.status = message.get("status", SWITCHED)
            elapsed = (time.perf_counter() - self.started) * 1000
            headers = [*message.get("headers", ()), (b"openai-processing-ms", b"%d" % elapsed)]
            if self._echo_id:
                headers.append((b"x-request-id", self.id.encode("latin-1")))
            if not self.body.complete and self.scope["method"] not in ("GET", "HEAD", "OPTIONS"):
                headers.append((b"connection", b"close"))  # the rest of the body is not worth reading
            message = {**message, "headers": headers}
        return self._send(message)


class HttpMiddleware:
    """``cors`` is around the app and around every error, which a page could not read without its headers."""

    def __init__(self, app: ASGIApp, state: ServerState, has_keys: bool, cors: Layer | None = None) -> None:
        self._app = app if cors is None else cors(app)
        self._cors = cors
        self._state = state
        self.state = state  # for the server: how to drain and to cut
        self.has_keys = has_keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return await _lifespan(receive, send)
        config = self._state.config
        body = LimitedBody(receive, config)
        body.complete = scope["type"] == "websocket"  # its messages are its endpoint's to bound
        exchange = _Exchange(scope, body, send, config.enable_request_id_headers)
        scope.setdefault("state", {})["request_id"] = exchange.id
        scope["app"] = self  # Starlette's routes raise for a wrong method only inside of an app
        if config.root_path:  # dropped from a path that begins with it: a proxy may keep its prefix
            scope["root_path"] = config.root_path.rstrip("/")
        counted = 0 if scope["type"] == "websocket" else 1  # an open connection is no request
        self._state.lifecycle.num_requests += counted
        try:
            await self._answer(exchange)
        finally:
            self._state.lifecycle.num_requests -= counted
            self._record(exchange)

    async def _answer(self, exchange: _Exchange) -> None:
        try:
            check_head(exchange.scope, self._state.config)
            await self._app(exchange.scope, exchange.body, exchange.send)
        except ClientDisconnect:
            exchange.status = exchange.status or CLIENT_LEFT
        except ChoraleError as error:
            await self._fail(exchange, error)
        except HTTPException as error:
            await self._fail(exchange, _from_starlette(error), dict(error.headers or {}))
        except Exception:
            logger.exception("request %s failed", exchange.id)
            await self._fail(exchange, ChoraleError(f"an internal error occurred (request {exchange.id})"))

    async def _fail(
        self, exchange: _Exchange, error: ChoraleError, headers: dict[str, str] | None = None
    ) -> None:
        if exchange.status:
            # On a WebSocket this is the end of the connection.
            logger.error("request %s failed after its answer began: %s", exchange.id, error)
            return
        if error.status in (401, 404, 405, 413, 415) and not _expects_continue(exchange.scope):
            await exchange.body.discard()
        response = error_answer(error, exchange.scope, exchange.id)
        response.headers.update(headers or {})
        # Around a refused preflight it would answer in place of the error.
        cors = self._cors if exchange.method != "OPTIONS" else None
        answer = response if cors is None else cors(response)
        await answer(exchange.scope, exchange.body, exchange.send)

    def _record(self, exchange: _Exchange) -> None:
        elapsed = time.perf_counter() - exchange.started
        status = exchange.status or CLIENT_LEFT
        handler = exchange.scope.get(HANDLER, _UNMATCHED)
        if status != SWITCHED:
            self._state.metrics.http_finished(handler, exchange.method, status, elapsed)
        if self._state.config.access_log:
            level = logging.DEBUG if handler in OPEN_PATHS else logging.INFO
            client = exchange.scope.get("client") or ("-",)
            access_logger.log(
                level,
                "%s %s %s %d %.1fms id=%s",
                client[0],
                exchange.method,
                ascii(exchange.scope["path"])[1:-1][:200],  # escaped: a path may hold control characters
                status,
                elapsed * 1000,
                exchange.id,
            )


async def _lifespan(receive: Receive, send: Send) -> None:
    """Nothing to start or stop: the state was built before the app, and outlives it."""
    while True:
        kind = (await receive())["type"]
        await send({"type": f"{kind}.complete"})
        if kind == "lifespan.shutdown":
            return


def _expects_continue(scope: Scope) -> bool:
    return any(name == b"expect" for name, _ in scope["headers"])


def _from_starlette(error: HTTPException) -> ChoraleError:
    if error.status_code == 405:
        return MethodNotAllowedError("this path does not take this method")
    if error.status_code == 404:
        return NotFoundError("unknown path", code="unknown_url")
    return RequestError(error.detail)


async def unknown_path(scope: Scope, receive: Receive, send: Send) -> None:
    """The router's last resort."""
    raise NotFoundError(
        f"Unknown request URL: {scope['method']} {scope['path'][:200]}. See /docs.", code="unknown_url"
    )
