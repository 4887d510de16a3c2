"""API keys (bearer tokens, x-api-key or api-key), checked at the matched route; and the request id.

Every route requires a key unless its own path is in ``OPEN_PATHS``. The check belongs to the route object
that the router matched and never looks at the request's path or Host header, so no spelling of a URL bypasses
it. Only SHA-256 digests of keys are kept.

The key is the owner of a request: owners share the engine fairly, and each has a prefix-cache salt.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import uuid
from collections.abc import Awaitable, Callable, Iterable
from contextvars import ContextVar
from typing import Any

from starlette.requests import Request
from starlette.routing import BaseRoute, Route, WebSocketRoute
from starlette.types import ASGIApp, Receive, Scope, Send

from chorale.errors import AuthenticationError

PAGE_PATHS = ("/", "/page/settings", "/static/{version}/{file:path}")  # the chat page
DOCS_PATHS = ("/docs", "/docs/start.js", "/docs/swagger-ui-bundle.js", "/docs/swagger-ui.css")


# Health probes, metrics and the API description (open in vLLM, too), and the HTML pages, which prompt for a
# key. None of them reveals anything about requests.
OPEN_PATHS = frozenset({*PAGE_PATHS, "/health", "/ready", "/ping", "/metrics", "/openapi.json", *DOCS_PATHS})

Endpoint = Callable[[Request], Awaitable[ASGIApp]] | ASGIApp

HANDLER = "chorale.handler"  # scope key: the matched route's path template
# Scope key: the digest of an API key that was checked earlier. Set for batch lines, since keys themselves are
# not stored. A client cannot set it.
OWNER = "chorale.owner"
_PLAIN = (b"x-api-key", b"api-key")  # Anthropic's header and Azure's
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
# The digest of the current request's API key, b"" without keys. Tasks that the request starts inherit it.
CALLER: ContextVar[bytes] = ContextVar("chorale_caller", default=b"")


class AuthenticatedRoute:
    """The ASGI app of one route: checks the key, then calls the endpoint.

    Calls the endpoint directly, without Starlette's wrapper, whose search for exception handlers would cost
    time with every streamed token.

    Records the route's name for logs and metrics, and sets ``request.state.owner`` to the digest of the key
    (empty on a server without keys), which separates the stored objects of different keys.
    """

    def __init__(self, endpoint: Endpoint, handler: str, api_key_hashes: tuple[bytes, ...]) -> None:
        self._endpoint: Any = endpoint
        self._handler = handler
        self._hashes = api_key_hashes

    def admit(self, scope: Scope) -> None:
        """Checks the key and records route and owner. Raises ``AuthenticationError``."""
        scope[HANDLER] = self._handler
        owner = scope.get(OWNER)
        if owner is None:
            owner = self._owner(scope) if self._hashes else b""
        scope.setdefault("state", {})["owner"] = owner
        CALLER.set(owner)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.admit(scope)
        response = await self._endpoint(Request(scope, receive))
        await response(scope, receive, send)

    def _owner(self, scope: Scope) -> bytes:
        """Returns the digest of the caller's key. Raises ``AuthenticationError``.

        If several headers are present, any of them may contain the valid key.
        """
        for key in _keys(scope):
            digest = hashlib.sha256(key.strip()).digest()
            # Compare with every key in constant time, so that timing reveals nothing.
            matches = [hmac.compare_digest(digest, known) for known in self._hashes]
            if any(matches):
                return digest
        raise AuthenticationError("a valid API key is needed: Authorization: Bearer KEY")


class AuthenticatedSocket(AuthenticatedRoute):
    """The ASGI app of a WebSocket route. The endpoint is an ASGI app; errors are handshake responses."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.admit(scope)
        await self._endpoint(scope, receive, send)


def _keys(scope: Scope) -> list[bytes]:
    """Returns the keys in the headers. A repeated header is ignored."""
    bearer = [value for name, value in scope["headers"] if name == b"authorization"]
    found = []
    for header in _PLAIN:
        plain = [value for name, value in scope["headers"] if name == header]
        found += plain if len(plain) == 1 else []
    if len(bearer) == 1:
        scheme, _, key = bearer[0].partition(b" ")
        if scheme.lower() == b"bearer":
            found.append(key.strip())
    return found


def authenticate_routes(routes: Iterable[BaseRoute], api_key_hashes: Iterable[bytes]) -> list[BaseRoute]:
    """Adds authentication to each route whose path is not open.

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
    """Returns the client's X-Request-Id if it is printable and at most 128 characters, else a new id."""
    for name, value in scope["headers"]:
        if name == b"x-request-id":
            text = value.decode("latin-1").strip()
            if _REQUEST_ID.fullmatch(text):
                return str(text)
    return f"req_{uuid.uuid4().hex}"


def cache_salt(owner: bytes, asked: str | None) -> str:
    """Combines the owner with the client's salt, so that API keys share no cached pages.

    Otherwise a client could probe other clients' prompts: ``cached_tokens`` and the time to the first token
    reveal whether a prompt prefix has been computed before. ``owner``: the API key's digest, empty on a
    server without keys. ``asked``: the request's ``cache_salt``, which separates requests with the same key.
    """
    salt = asked or ""
    if not owner:
        return salt
    return hashlib.sha256(
        b"chorale prefix cache\0" + owner + salt.encode("utf-8", "surrogatepass")
    ).hexdigest()
