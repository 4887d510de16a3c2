"""The ASGI half of the guard: Host, Origin, Expect, body size, body time. ``protocol`` is the other half.

Both exist because neither uvicorn nor httptools bounds what a client sends. Limits are the ones of
``ServerConfig``; each has its status: 400 Host, 403 Origin, 413 size, 408 time, 417 Expect.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import re
import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from chorale.api.http.responses import error_response
from chorale.config import ServerConfig
from chorale.errors import (
    ExpectationError,
    PayloadTooLargeError,
    PermissionDeniedError,
    RequestError,
    RequestTimeoutError,
)

BODY_IDLE_SECONDS = 5.0
# After a refusal the rest of a body is read and dropped for a moment: a client that is still sending when
# the connection closes sees a reset in place of the answer.
_DRAIN_SECONDS = 2.0
_DRAIN_IDLE_SECONDS = 0.3
_DRAIN_BYTES = 64 * 2**20
_HOST = re.compile(rb"[A-Za-z0-9.\-:\[\]_]{1,255}")


class LimitedBody:
    """An ASGI ``receive`` that raises ``PayloadTooLargeError`` or ``RequestTimeoutError`` in the reader."""

    __slots__ = ("_deadline", "_idle", "_max_bytes", "_num_bytes", "_receive", "_total", "complete")

    def __init__(self, receive: Receive, config: ServerConfig) -> None:
        self._receive = receive
        self._max_bytes = config.max_body_bytes
        self._num_bytes = 0
        self._total = config.body_timeout
        self._idle = min(BODY_IDLE_SECONDS, config.body_timeout)
        self._deadline: float | None = None
        self.complete = False

    async def __call__(self) -> Message:
        if self.complete:  # from here on only a disconnect can come, in its own time
            return await self._receive()
        now = time.monotonic()
        if self._deadline is None:
            self._deadline = now + self._total
        try:
            async with asyncio.timeout(max(0.0, min(self._idle, self._deadline - now))):
                message = await self._receive()
        except TimeoutError:
            raise RequestTimeoutError("the body did not arrive in time") from None
        self._num_bytes += len(message.get("body", b""))
        self.complete = not message.get("more_body", False)
        if self._num_bytes > self._max_bytes:
            raise too_large(self._max_bytes)
        return message

    async def discard(self) -> None:
        """Read and drop what the client still sends, for a moment; stop early when it sends nothing."""
        end = time.monotonic() + _DRAIN_SECONDS
        with contextlib.suppress(TimeoutError):
            while not self.complete and self._num_bytes < _DRAIN_BYTES and time.monotonic() < end:
                async with asyncio.timeout(_DRAIN_IDLE_SECONDS):
                    message = await self._receive()
                self._num_bytes += len(message.get("body", b""))
                self.complete = not message.get("more_body", False)


def too_large(max_bytes: int) -> PayloadTooLargeError:
    return PayloadTooLargeError(f"the body is larger than {max_bytes} bytes")


def check_head(scope: Scope, config: ServerConfig) -> None:
    """What the header alone can decide. Raises ``RequestError`` or one of its kinds."""
    hosts = [value for name, value in scope["headers"] if name == b"host"]
    if len(hosts) > 1 or (not hosts and scope.get("http_version") != "1.0"):
        raise RequestError("exactly one Host header is needed", code="invalid_host")
    if hosts and not _HOST.fullmatch(hosts[0]):
        raise RequestError("the Host header is malformed", code="invalid_host")
    if scope["type"] == "websocket":
        _check_origin(scope, hosts[0], config)
    for name, value in scope["headers"]:
        if name == b"expect" and value.strip().lower() != b"100-continue":
            raise ExpectationError(f"Expect: {value[:64].decode('latin-1')!r} cannot be met")
        if name == b"content-length" and value.isdigit() and int(value[:20]) > config.max_body_bytes:
            raise too_large(config.max_body_bytes)


def _check_origin(scope: Scope, host: bytes, config: ServerConfig) -> None:
    """Browsers let any page open a WebSocket to any address, and name the page in Origin; CORS is not asked.

    Pages of this server and of ``allowed_origins`` may; programs that are no browsers send no Origin.
    """
    for name, value in scope["headers"]:
        if name != b"origin":
            continue
        origin = value.decode("latin-1")
        _, _, authority = origin.partition("://")
        same = authority.lower().encode("latin-1") == host.lower()
        if not same and origin not in config.allowed_origins and "*" not in config.allowed_origins:
            raise PermissionDeniedError(
                f"pages of {origin[:128]!r} may not open a WebSocket here; --allowed-origins lets them",
                code="origin_not_allowed",
            )


class LocalHosts:
    """Refuses Host names that are not this machine's: what a rebound DNS name in a browser would send.

    For servers bound to a loopback address without a key; behind a key a browser has nothing to abuse.
    """

    def __init__(self, app: ASGIApp, host: str) -> None:
        self._app = app
        self._host = host

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] in ("http", "websocket") and not self._is_local(scope):
            error = RequestError(
                "this server answers to local names only; give it an API key (or --root-path behind a proxy) "
                "to use others",
                code="invalid_host",
            )
            return await error_response(error)(scope, receive, send)
        return await self._app(scope, receive, send)

    def _is_local(self, scope: Scope) -> bool:
        for name, value in scope["headers"]:
            if name == b"host":
                host = host_name(value.decode("latin-1"))
                return host in ("localhost", self._host) or is_loopback(host)
        return True  # absent: check_head decides


def host_name(authority: str) -> str:
    """Without port and brackets, lower case: ``[::1]:8000`` is ``::1``."""
    if authority.startswith("["):
        return authority[1:].partition("]")[0].lower()
    return authority.partition(":")[0].lower()


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")
