"""Who may call: keys (bearer tokens, or x-api-key), checked at the matched route; and the request id.

Every route is guarded unless its own path is in ``OPEN_PATHS``. The decision hangs on the route object that
the router matched, never on the text of a path or a Host header, so no spelling of a URL gets around it.
Keys are held as SHA-256 digests only.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import uuid
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from starlette.requests import Request
from starlette.routing import BaseRoute, Route, WebSocketRoute
from starlette.types import ASGIApp, Receive, Scope, Send

from chorale.api.operator import docs
from chorale.errors import AuthenticationError

# Probes, scrapes and the API's description, as vLLM leaves them, and the pages, which ask for a key. None of
# them shows anything of a request.
OPEN_PATHS = frozenset({"/", "/health", "/ready", "/ping", "/metrics", "/openapi.json", *docs.PATHS})

Endpoint = Callable[[Request], Awaitable[ASGIApp]] | ASGIApp

HANDLER = "chorale.handler"  # scope key: the matched route's path template
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")


def hash_key(key: str) -> bytes:
    """What is kept of a key: its SHA-256."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


class AuthenticatedRoute:
    """The ASGI app of one route: its endpoint, behind the keys.

    Calls the endpoint itself, in place of Starlette's wrapper: that one looks for exception handlers, of
    which there are none, and would be paid for with every streamed token.

    Leaves the route's name for logs and metrics, and ``request.state.owner``: the digest of the key that
    was used (empty on a server without keys), by which stored objects are kept apart.
    """

    def __init__(self, endpoint: Endpoint, handler: str, api_key_hashes: tuple[bytes, ...]) -> None:
        self._endpoint: Any = endpoint
        self._handler = handler
        self._hashes = api_key_hashes

    def admit(self, scope: Scope) -> None:
        """Raises ``AuthenticationError``."""
        scope[HANDLER] = self._handler
        scope.setdefault("state", {})["owner"] = self._owner(scope) if self._hashes else b""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.admit(scope)
        response = await self._endpoint(Request(scope, receive))
        await response(scope, receive, send)

    def _owner(self, scope: Scope) -> bytes:
        """The digest of the caller's key. Raises ``AuthenticationError``.

        ``x-api-key`` is Anthropic's way to send one; where both headers stand, either may be right.
        """
        for key in _keys(scope):
            digest = self._known(key)
            if digest is not None:
                return digest
        raise AuthenticationError("a valid API key is needed: Authorization: Bearer KEY")

    def _known(self, key: bytes) -> bytes | None:
        """The digest of a key, if it is one of ours."""
        digest = hashlib.sha256(key.strip()).digest()
        # Every key is compared, so the time tells neither which one matched nor how much of it.
        matches = [hmac.compare_digest(digest, known) for known in self._hashes]
        return digest if any(matches) else None


class AuthenticatedSocket(AuthenticatedRoute):
    """The same for a WebSocket, whose endpoint is an ASGI app. Refusals are answers to the handshake."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.admit(scope)
        await self._endpoint(scope, receive, send)


def _keys(scope: Scope) -> list[bytes]:
    """At most one of each header: a header that stands twice is nobody's."""
    bearer = [value for name, value in scope["headers"] if name == b"authorization"]
    plain = [value for name, value in scope["headers"] if name == b"x-api-key"]
    found = [plain[0]] if len(plain) == 1 else []
    if len(bearer) == 1:
        scheme, _, key = bearer[0].partition(b" ")
        if scheme.lower() == b"bearer":
            found.append(key.strip())
    return found


def authenticate_routes(routes: Iterable[BaseRoute], api_key_hashes: Iterable[bytes]) -> list[BaseRoute]:
    """Put each route behind the keys, unless its path is open.

    Endpoints are coroutine functions; those of a ``WebSocketRoute`` are ASGI apps.
    """
    hashes = tuple(api_key_hashes)
    found = list(routes)
    for route in found:
        if isinstance(route, WebSocketRoute):
            route.app = AuthenticatedSocket(route.endpoint, route.path, hashes)
        elif isinstance(route, Route):
            route.app = AuthenticatedRoute(
                route.endpoint, route.path, () if route.path in OPEN_PATHS else hashes
            )
    return found


def request_id(scope: Scope) -> str:
    """The client's X-Request-Id if it is printable and at most 128 characters, else a new one."""
    for name, value in scope["headers"]:
        if name == b"x-request-id":
            text = value.decode("latin-1").strip()
            if _REQUEST_ID.fullmatch(text):
                return str(text)
    return f"req_{uuid.uuid4().hex}"
