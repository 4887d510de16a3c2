"""Request limits at the ASGI level: Host (400), Origin (403), Expect (417), body size (413) and body time
(408).

``serve/http/protocol.py`` has the limits below ASGI. uvicorn and httptools limit nothing that a client sends.
The values come from ``ServerConfig``.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import re
import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from chorale.api.http.responses import error_response
from chorale.config.engine import ServerConfig
from chorale.errors import (
    ExpectationError,
    PayloadTooLargeError,
    PermissionDeniedError,
    RequestError,
    RequestTimeoutError,
)

BODY_IDLE_SECONDS = 5.0
RATE_SECONDS = 30.0  # period over which the rate of a body is averaged
# After an error, the rest of the body is read and dropped for a few seconds: a client that is still sending
# when the connection closes would see a reset instead of the response.
_DRAIN_SECONDS = 5.0
_DRAIN_IDLE_SECONDS = 1.0
_DRAIN_BYTES = 64 * 2**20
UPLOAD_PATH = "/v1/files"
FORM_OVERHEAD = 2**17  # maximum bytes of a form in addition to its file
_LEAST_RATE = 2**18  # bytes per second; the timeout of uploads allows the largest file at this rate
_SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
_OWN_SITE = ("same-origin", "none")  # values of Sec-Fetch-Site: a page of this server, or user input
_HOST = re.compile(rb"[A-Za-z0-9.\-:\[\]_]{1,255}")


class LimitedBody:
    """An ASGI ``receive`` that raises ``PayloadTooLargeError`` or ``RequestTimeoutError``."""

    __slots__ = (
        "_credit", "_deadline", "_idle", "_max_bytes", "_num_bytes", "_rate", "_receive", "_total",
        "complete",
    )  # fmt: skip

    def __init__(self, receive: Receive, scope: Scope, config: ServerConfig) -> None:
        self._receive = receive
        self._max_bytes = max_body_bytes(scope, config)
        self._num_bytes = 0
        self._total = config.body_timeout
        if self._max_bytes != config.max_body_bytes:
            self._total = max(self._total, self._max_bytes / _LEAST_RATE)
        self._idle = min(BODY_IDLE_SECONDS, config.body_timeout)
        # Seconds that the client has left. Bytes that arrive at the minimum rate keep it constant.
        self._credit, self._rate = RATE_SECONDS, config.min_upload_rate
        self._deadline: float | None = None
        self.complete = False

    async def __call__(self) -> Message:
        if self.complete:  # only a disconnect can follow, without a time limit
            return await self._receive()
        now = time.monotonic()
        if self._deadline is None:
            self._deadline = now + self._total
        try:
            async with asyncio.timeout(max(0.0, min(self._idle, self._deadline - now, self._credit))):
                message = await self._receive()
        except TimeoutError:
            raise RequestTimeoutError("the body did not arrive in time") from None
        size = len(message.get("body", b""))
        if self._rate:
            waited = time.monotonic() - now
            self._credit = min(RATE_SECONDS, self._credit - waited + size / self._rate)
        self._num_bytes += size
        self.complete = not message.get("more_body", False)
        if self._num_bytes > self._max_bytes:
            raise too_large(self._max_bytes)
        return message

    async def discard(self) -> None:
        """Reads and drops the rest of the body for a few seconds, or until the client stops sending."""
        end = time.monotonic() + _DRAIN_SECONDS
        with contextlib.suppress(TimeoutError):
            most = max(_DRAIN_BYTES, self._max_bytes)
            while not self.complete and self._num_bytes < most and time.monotonic() < end:
                async with asyncio.timeout(_DRAIN_IDLE_SECONDS):
                    message = await self._receive()
                self._num_bytes += len(message.get("body", b""))
                self.complete = not message.get("more_body", False)


def max_body_bytes(scope: Scope, config: ServerConfig) -> int:
    """Returns the maximum size of a request's body in bytes, which is larger for file uploads."""
    if scope["type"] == "http" and scope["method"] == "POST" and _is_upload(scope["path"], scope):
        return max(config.max_body_bytes, config.batch_max_file_bytes + FORM_OVERHEAD)
    return config.max_body_bytes


def _is_upload(path: str, scope: Scope) -> bool:
    return path == UPLOAD_PATH or path == scope.get("root_path", "") + UPLOAD_PATH


def too_large(max_bytes: int) -> PayloadTooLargeError:
    return PayloadTooLargeError(f"the body is larger than {max_bytes} bytes")


def check_head(scope: Scope, config: ServerConfig, has_keys: bool) -> None:
    """Checks the headers. Raises ``RequestError`` or a subclass."""
    hosts = [value for name, value in scope["headers"] if name == b"host"]
    if len(hosts) > 1 or (not hosts and scope.get("http_version") != "1.0"):
        raise RequestError("exactly one Host header is required", code="invalid_host")
    if hosts and not _HOST.fullmatch(hosts[0]):
        raise RequestError("the Host header is malformed", code="invalid_host")
    # Pages of other sites do not know a key. WebSockets are always checked: CORS does not apply to them.
    if scope["type"] == "websocket" or not (has_keys or scope["method"] in _SAFE_METHODS):
        _check_origin(scope, config)
    for name, value in scope["headers"]:
        if name == b"expect" and value.strip().lower() != b"100-continue":
            raise ExpectationError(f"Expect: {value[:64].decode('latin-1')!r} is not supported")
        if name == b"content-length" and value.isdigit() and int(value[:20]) > max_body_bytes(scope, config):
            raise too_large(max_body_bytes(scope, config))


def _check_origin(scope: Scope, config: ServerConfig) -> None:
    """Refuses requests from pages of other sites: browsers send forms and files without a preflight request.

    Allows pages of this server and of ``allowed_origins``, and clients that send neither header, which are
    not browsers. Sec-Fetch-Site stays correct behind a proxy that replaces the Host. Older browsers, and all
    browsers that use plain HTTP to another machine, send only the Origin.
    """
    headers = dict(scope["headers"])
    site = headers.get(b"sec-fetch-site", b"").decode("latin-1")
    origin = headers.get(b"origin", b"").decode("latin-1")
    if site in _OWN_SITE or not (site or origin):
        return
    host = headers.get(b"host", b"").decode("latin-1")
    is_own = host != "" and origin.partition("://")[2].lower() == host.lower()
    if not is_own and origin not in config.allowed_origins and "*" not in config.allowed_origins:
        raise PermissionDeniedError(
            f"pages of {origin[:128]!r} may not send requests to this server; --allowed-origins can allow it",
            code="origin_not_allowed",
        )


class LocalHosts:
    """Refuses Host names other than this machine's, as a protection against DNS rebinding in browsers.

    For servers on a loopback address without an API key; a key already prevents such access.
    """

    def __init__(self, app: ASGIApp, host: str) -> None:
        self._app = app
        self._host = host

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] in ("http", "websocket") and not self._is_local(scope):
            error = RequestError(
                "this server accepts local host names only; set an API key (or --root-path behind a proxy) "
                "to allow others",
                code="invalid_host",
            )
            return await error_response(error)(scope, receive, send)
        return await self._app(scope, receive, send)

    def _is_local(self, scope: Scope) -> bool:
        for name, value in scope["headers"]:
            if name == b"host":
                host = host_name(value.decode("latin-1"))
                # A connection to 0.0.0.0 or [::] can only reach this machine.
                return host in ("localhost", "0.0.0.0", "::", self._host) or is_loopback(host)
        return True  # a missing header is handled by check_head


def host_name(authority: str) -> str:
    """Returns the host in lower case without port and brackets: ``::1`` for ``[::1]:8000``."""
    if authority.startswith("["):
        return authority[1:].partition("]")[0].lower()
    return authority.partition(":")[0].lower()


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")
