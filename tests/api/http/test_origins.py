"""Pages of other sites cannot change anything on a server without keys; other clients can."""

from __future__ import annotations

from typing import Any

import pytest

from chorale.api.app import all_routes
from chorale.config.engine import hash_key
from tests.support.raw_http import call
from tests.support.server import Server
from tests.support.server import served_on_port as served

CHAT = {"messages": [{"role": "user", "content": "Hi"}]}
FOREIGN: list[dict[str, str]] = [
    {"origin": "http://evil.example"},
    {"origin": "http://localhost.evil.example"},
    {"origin": "null"},
    {"origin": "http://localhost:3000", "sec-fetch-site": "same-site"},
    {"origin": "http://evil.example", "sec-fetch-site": "cross-site"},
    {"sec-fetch-site": "cross-site"},
]
OWN: list[dict[str, str]] = [
    {},
    {"origin": "http://localhost"},
    {"origin": "http://LOCALHOST", "sec-fetch-site": "same-origin"},
    {"origin": "https://chat.example", "sec-fetch-site": "same-origin"},  # a proxy has replaced the Host
    {"sec-fetch-site": "none"},
]


@pytest.mark.parametrize("headers", FOREIGN, ids=str)
async def test_pages_of_other_sites_cannot_post_or_delete(headers: dict[str, str]) -> None:
    async with served() as server:
        routes = [(path, method) for path, method in every_route(server) if method in ("POST", "DELETE")]
        assert len(routes) > 20
        for path, method in routes:
            answer = await call(server.port, method, path, None, headers)
            assert answer.status == 403, (method, path)
            if path.startswith("/v1/messages"):
                assert answer.json["error"]["type"] == "permission_error"
            else:
                assert answer.code == "origin_not_allowed"


def every_route(server: Server) -> list[tuple[str, str]]:
    routes: list[Any] = all_routes(server.state)
    found = [(route.path, method) for route in routes for method in getattr(route, "methods", None) or ()]
    return [(path.replace("{", "").replace("}", "").replace(":path", ""), method) for path, method in found]


@pytest.mark.parametrize("headers", OWN, ids=str)
async def test_own_pages_and_clients_other_than_browsers_are_served(headers: dict[str, str]) -> None:
    async with served() as server:
        assert (await call(server.port, "POST", "/v1/chat/completions", CHAT, headers)).status == 200


async def test_get_requests_are_allowed_from_any_origin() -> None:
    async with served() as server:
        for headers in FOREIGN:
            assert (await call(server.port, "GET", "/v1/models", None, headers)).status == 200


async def test_an_allowed_origin_is_served() -> None:
    async with served(allowed_origins=("https://app.example",)) as server:
        for headers in FOREIGN[:2]:
            allowed = headers | {"sec-fetch-site": "cross-site", "origin": "https://app.example"}
            assert (await call(server.port, "POST", "/v1/chat/completions", CHAT, allowed)).status == 200
            assert (await call(server.port, "POST", "/v1/chat/completions", CHAT, headers)).status == 403


async def test_requests_with_a_key_are_allowed_from_any_origin() -> None:
    """Pages of other sites do not know the key, and browsers do not add it by themselves."""
    async with served(keys=[hash_key("k")]) as server:
        sent = {"origin": "app://notes", "authorization": "Bearer k"}
        assert (await call(server.port, "POST", "/v1/chat/completions", CHAT, sent)).status == 200


@pytest.mark.parametrize("host", ["0.0.0.0:8000", "0.0.0.0", "[::]:8000"])
async def test_the_unspecified_address_is_a_local_host_name(host: str) -> None:
    """Guides run benchmarks with ``--host 0.0.0.0``."""
    async with served() as server:
        for path in ("/health", "/metrics", "/v1/models"):
            assert (await call(server.port, "GET", path, None, {"host": host})).status == 200
        assert (await call(server.port, "GET", "/health", None, {"host": "0.0.0.1"})).status == 400
