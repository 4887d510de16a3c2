"""The assembled app: keys, request ids, errors, probes, models, tokens, OpenAPI, CORS, the access log."""

from __future__ import annotations

import json
import logging
import re
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest
from starlette.routing import Route

from chorale.api.app import all_routes
from chorale.api.http.anthropic_errors import PATHS as MESSAGES_PATHS
from chorale.api.http.auth import DOCS_PATHS, OPEN_PATHS, PAGE_PATHS
from chorale.api.openapi import describe
from chorale.api.operations import OPERATIONS
from chorale.client.base import EngineStatus
from chorale.config.engine import hash_key
from chorale.version import __version__
from tests.support.raw_http import Answer, Probe, call, exchange, handshake
from tests.support.scripted import scripted
from tests.support.server import Server, make_state
from tests.support.server import served_on_port as served

KEY = "sk-canary-7f3a9"


def probed() -> AbstractAsyncContextManager[Server]:
    probe = Probe()
    return served(handlers={"/echo": probe.echo, "/fault": probe.fault})


# --------------------------------------------------------------------------- keys


def concrete(path: str) -> str:
    return path.replace("{model:path}", "demo").replace("{", "").replace("}", "").replace(":path", "")


async def asked(port: int, method: str | None, path: str, headers: dict[str, str]) -> Answer:
    """Returns the answer to ``{}``, or without a method to a WebSocket's handshake."""
    if method is not None:
        return await call(port, method, path, {}, headers)
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    return await exchange(port, handshake(lines.encode(), path.encode()))


async def test_every_route_except_the_open_paths_needs_a_key() -> None:
    async with served(keys=(hash_key("other"), hash_key(KEY))) as server:
        for route in all_routes(server.state):
            methods = getattr(route, "methods", ())  # a WebSocket has none
            method = next((name for name in ("POST", "GET", "DELETE") if name in methods), None)
            for headers in ({}, {"authorization": f"Bearer {KEY}x"}, {"x-api-key": f"{KEY}x"}):
                answer = await asked(server.port, method, concrete(route.path), headers)
                if route.path in OPEN_PATHS:
                    assert answer.status == (404 if "{" in route.path else 200), route.path
                else:
                    assert answer.status == 401, route.path
                    if route.path in MESSAGES_PATHS:
                        assert answer.json["error"]["type"] == "authentication_error"
                    else:
                        assert answer.code == "invalid_api_key", route.path
                    assert answer.headers["www-authenticate"] == "Bearer"
            key = {"authorization": f"Bearer {KEY}"}
            allowed = await asked(server.port, method, concrete(route.path), key)
            assert allowed.status != 401, route.path
            key = {"x-api-key": KEY}  # Anthropic's way
            assert (await asked(server.port, method, concrete(route.path), key)).status != 401


X, BEARER = f"x-api-key: {KEY}\r\n", f"authorization: Bearer {KEY}\r\n"


@pytest.mark.parametrize(
    ("lines", "status"),
    [
        *[(f"authorization: {scheme} {KEY}\r\n", 200) for scheme in ("Bearer", "bearer", "BEARER")],
        # Whitespace around a key is ignored.
        *[(line.format(KEY), 200) for line in ("x-api-key:  {} \t\r\n", "authorization: Bearer   {}  \r\n")],
        *[(f"{header}:{KEY}\r\n", 200) for header in ("X-API-Key", "api-key")],  # Azure has api-key
        ("api-key: wrong\r\n", 401),
        *[(f"authorization: {value}\r\n", 401) for value in (f"Basic {KEY}", KEY, "Bearer ")],
        ("x-api-key: \r\n", 401),
        # A repeated header is refused: a proxy may have checked only one of the two values.
        *[(line + line, 401) for line in (X, BEARER)],
        *[(line + line.replace(KEY, "wrong"), 401) for line in (X, BEARER)],
        *[(line.replace(KEY, "wrong") + line, 401) for line in (X, BEARER)],
    ],
)
async def test_a_key_header_may_have_whitespace_but_not_be_repeated(lines: str, status: int) -> None:
    async with served(keys=(hash_key(KEY),)) as server:
        raw = f"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n{lines}\r\n"
        assert (await exchange(server.port, raw.encode())).status == status


@pytest.mark.parametrize(
    "path",
    [
        "//v1/models",
        "/v1//models",
        "/V1/models",
        "/v1/models/",
        "/v1/%6dodels",
        "/./v1/models",
        "/health/../v1/models",
    ],
)
async def test_no_spelling_of_a_path_bypasses_the_key(path: str) -> None:
    async with served(keys=(hash_key(KEY),)) as server:
        for host in ("localhost", "localhost/health?", "x/health#"):
            raw = f"GET {path} HTTP/1.1\r\nhost: {host}\r\n\r\n".encode()
            assert (await exchange(server.port, raw)).status in (307, 400, 401, 404)
        raw = f"GET http://localhost{path} HTTP/1.1\r\nhost: localhost\r\n\r\n".encode()
        assert (await exchange(server.port, raw)).status in (307, 400, 401, 404)


async def test_keys_never_reach_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        async with served(keys=(hash_key(KEY),)) as server:
            for key in (KEY, KEY + "wrong"):
                await call(server.port, "GET", "/v1/models", None, {"authorization": f"Bearer {key}"})
                await call(server.port, "POST", "/tokenize", {"bad": 1}, {"authorization": f"Bearer {key}"})
    assert "/v1/models" in caplog.text
    assert KEY not in caplog.text


# --------------------------------------------------------------------------- ids, errors, log


@pytest.mark.parametrize(
    ("given", "echoed"),
    [("abc-123", True), ("x" * 128, True), ("x" * 129, False), ("a b", False), ("é", False)],
)
async def test_valid_request_ids_are_echoed_and_others_replaced(given: str, echoed: bool) -> None:
    raw = f"GET /version HTTP/1.1\r\nhost: localhost\r\nx-request-id: {given}\r\n\r\n".encode("latin-1")
    async with served() as server:
        answer = await exchange(server.port, raw)
        assert (answer.headers["x-request-id"] == given) is echoed
        assert answer.headers["x-request-id"]
        assert int(answer.headers["openai-processing-ms"]) >= 0
        assert "server" not in answer.headers


async def test_request_id_headers_can_be_disabled() -> None:
    async with served(enable_request_id_headers=False) as server:
        assert "x-request-id" not in (await call(server.port, "GET", "/version")).headers


async def test_an_internal_error_is_500_without_details(caplog: pytest.LogCaptureFixture) -> None:
    async with probed() as server:
        answer = await call(server.port, "POST", "/fault", {}, {"x-request-id": "find-me"})
        assert (answer.status, answer.code) == (500, "internal_error")
        assert "find-me" in answer.json["error"]["message"]
        assert b"secret" not in answer.body
    assert "find-me" in caplog.text
    assert "a secret detail" in caplog.text


async def test_unknown_paths_are_404_and_wrong_methods_405() -> None:
    async with served() as server:
        unknown = await call(server.port, "GET", "/v1/nothing")
        assert (unknown.status, unknown.code) == (404, "unknown_url")
        assert unknown.json["error"]["type"] == "invalid_request_error"
        assert "base URL" not in unknown.json["error"]["message"]
        for path, ending in (("/responses", "must end in /v1"), ("/v1/v1/responses", "must not end in /v1")):
            assert ending in (await call(server.port, "POST", path)).json["error"]["message"]
        wrong = await call(server.port, "DELETE", "/tokenize")
        assert (wrong.status, wrong.code) == (405, "method_not_allowed")
        assert wrong.headers["allow"] == "POST"
        head = await exchange(server.port, b"HEAD /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert head.status == 200


@pytest.mark.parametrize(
    ("method", "path", "location"),
    [
        ("GET", "/v1/models/", "/v1/models"),
        ("POST", "/v1/chat/completions/?a=b%20c", "/v1/chat/completions?a=b%20c"),
        ("POST", "/prefix/v1/responses//", "/prefix/v1/responses"),
        ("POST", "/v1/responses/", "/prefix/v1/responses"),  # the proxy has removed the prefix
        ("GET", "/v1/models/a%0db/", "/prefix/v1/models/a%0Db"),
    ],
)
async def test_a_trailing_slash_is_redirected(method: str, path: str, location: str) -> None:
    async with served(**{"root_path": "/prefix"} if "/prefix" in location else {}) as server:
        answer = await call(server.port, method, path, {} if method == "POST" else None)
        assert (answer.status, answer.headers["location"]) == (307, location)


@pytest.mark.parametrize("path", ["/v1/nothing/", "//evil.example/", "//", "/%2f/"])
async def test_unknown_paths_with_a_trailing_slash_are_404(path: str) -> None:
    async with served() as server:
        assert (await call(server.port, "GET", path)).status == 404


@pytest.mark.parametrize("access_log", [True, False])
async def test_the_access_log_is_one_escaped_line_and_can_be_disabled(
    caplog: pytest.LogCaptureFixture, access_log: bool
) -> None:
    with caplog.at_level(logging.INFO if access_log else logging.DEBUG, "chorale.access"):
        async with served(access_log=access_log) as server:
            await call(server.port, "GET", "/a%0ab%1b[31m", None, {"x-request-id": "one"})
            await call(server.port, "GET", "/health")
    lines = [record.getMessage() for record in caplog.records if record.name == "chorale.access"]
    assert len(lines) == access_log  # probes are logged at debug
    for line in lines:
        assert line.startswith("127.0.0.1 GET /a\\nb\\x1b[31m 404 ")
        assert line.endswith("id=one")


# --------------------------------------------------------------------------- probes


@pytest.mark.parametrize(
    ("status", "health", "ready"),
    [
        (EngineStatus("ready"), 200, 200),
        (EngineStatus("loading", "load", 0.25), 503, 503),
        (EngineStatus("dead"), 503, 503),
        (EngineStatus("failed", message="five deaths"), 503, 503),
        (EngineStatus("draining"), 200, 503),
    ],
)
async def test_probes_report_the_engines_state(status: EngineStatus, health: int, ready: int) -> None:
    client = scripted()
    client.status_value = status
    async with served(client=client) as server:
        answer = await call(server.port, "GET", "/health")
        assert answer.status == health
        if health == 200:
            assert answer.body == b""
        else:
            assert answer.json["status"] == status.state
            assert answer.json["phase"] == status.phase
            assert answer.json["progress"] == status.progress
            assert ("retry-after" in answer.headers) is (status.state != "failed")
        assert (await call(server.port, "GET", "/ready")).status == ready
        assert (await call(server.port, "POST", "/ping")).status == health
        assert (await call(server.port, "GET", "/metrics")).status == 200


async def test_metrics_show_the_response_store_and_work_after_its_close() -> None:
    async with served() as server:
        text = (await call(server.port, "GET", "/metrics")).body.decode()
        assert re.search(r"chorale:response_store_responses{.*} 0.0", text)
        assert re.search(r"chorale:response_store_conversations{.*} 0.0", text)
        assert re.search(r"chorale:background_responses{.*} 0.0", text)
        assert re.search(r"chorale:response_store_bytes{.*} 0.0", text)
        assert re.search(r"chorale:response_store_failures_total{.*} 0.0", text)
        await server.state.store.close()
        assert (await call(server.port, "GET", "/metrics")).status == 200


async def test_requests_are_503_while_the_engine_loads(caplog: pytest.LogCaptureFixture) -> None:
    """Without a line in the log for each: clients that wait would bury what the start says."""
    client = scripted()
    client.status_value = EngineStatus("loading")
    caplog.set_level("DEBUG", "chorale.access")
    async with served(client=client) as server:
        answer = await call(server.port, "GET", "/v1/models")
        assert (answer.status, answer.code) == (503, "engine_loading")
        assert answer.headers["retry-after"] == "1"
    lines = [each for each in caplog.records if each.name == "chorale.access"]
    assert {each.levelname for each in lines} == {"DEBUG"}


async def test_version_and_load_are_served() -> None:
    async with served() as server:
        assert (await call(server.port, "GET", "/version")).json == {"version": __version__}
        assert (await call(server.port, "GET", "/load")).json == {"server_load": 0}


# --------------------------------------------------------------------------- models, tokens


async def test_models_are_listed_and_found_by_name() -> None:
    async with served() as server:
        listed = (await call(server.port, "GET", "/v1/models")).json
        assert [card["id"] for card in listed["data"]] == ["demo", "gpt-oss-20b"]
        card = (await call(server.port, "GET", "/v1/models/gpt-oss-20b")).json
        assert card in listed["data"]
        assert (card["object"], card["max_model_len"], card["root"]) == ("model", 131072, "scripted")
        unknown = await call(server.port, "GET", "/v1/models/openai/other")
        assert (unknown.status, unknown.code) == (404, "model_not_found")


@pytest.mark.parametrize("repeats", [1, 3000])  # the longer one is counted and decoded in threads
async def test_detokenize_inverts_tokenize(repeats: int) -> None:
    async with served() as server:
        text = "Hello wörld 🎉<|return|>" * repeats
        answer = (
            await call(server.port, "POST", "/tokenize", {"prompt": text, "return_token_strs": True})
        ).json
        assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
        assert answer["tokens"][-1] == 200002
        assert answer["max_model_len"] == 131072
        back = await call(server.port, "POST", "/detokenize", {"tokens": answer["tokens"]})
        assert back.json == {"prompt": text}


_CHAT = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "So"}]}


@pytest.mark.parametrize(
    ("path", "data", "status", "param"),
    [
        ("/detokenize", {"tokens": [1, -1]}, 400, "tokens[1]"),
        ("/detokenize", {}, 400, "tokens"),
        ("/detokenize", {"tokens": [1] * 9000 + [-1]}, 400, "tokens[9000]"),  # long enough for a thread
        ("/tokenize", {"prompt": 5}, 400, "prompt"),
        ("/tokenize", {}, 400, "prompt"),
        ("/tokenize", {"prompt": "a", "model": "other"}, 404, "model"),
        ("/tokenize", {"prompt": "a", "nonsense": 1}, 400, "nonsense"),
        ("/tokenize", {"prompt": "a", "return_token_strs": "yes"}, 400, "return_token_strs"),
        ("/tokenize", {**_CHAT, "return_token_strs": "yes"}, 400, "return_token_strs"),
        ("/tokenize", {**_CHAT, "add_generation_prompt": "no"}, 400, "add_generation_prompt"),
        (
            "/tokenize",
            {**_CHAT, "continue_final_message": True, "add_generation_prompt": True},
            400,
            "add_generation_prompt",
        ),
        ("/tokenize", {**_CHAT, "nonsense": 1}, 400, "nonsense"),
    ],
)
async def test_tokenize_errors_name_the_field(
    path: str, data: dict[str, Any], status: int, param: str
) -> None:
    async with served(unknown_fields="refuse") as server:
        answer = await call(server.port, "POST", path, data)
        assert answer.status == status
        assert answer.json["error"]["param"] == param


@pytest.mark.parametrize("data", [{"prompt": "a"}, _CHAT])
async def test_null_fields_count_as_absent(data: dict[str, Any]) -> None:
    async with served() as server:
        nulls = {"model": None, "add_special_tokens": None, "return_token_strs": None}
        answer = await call(server.port, "POST", "/tokenize", {**data, **nulls})
        assert answer.status == 200
        assert answer.json == (await call(server.port, "POST", "/tokenize", data)).json


async def test_tokenize_returns_the_prompt_of_a_chat() -> None:
    async with served() as server:
        tool = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}
        chat = {"messages": [{"role": "user", "content": "Hi <|end|>"}], "tools": [tool]}
        answer = await call(server.port, "POST", "/tokenize", {**chat, "return_token_strs": True})
        tokens = answer.json["tokens"]
        assert server.state.vocab.decode(tokens[-2:]) == "<|start|>assistant"
        assert tokens.count(200007) == 3  # system, developer, user: none from the user's text
        assert "get_weather" in "".join(answer.json["token_strs"])
        asked = await call(server.port, "POST", "/v1/chat/completions", {**chat, "max_tokens": 5})
        assert asked.json["usage"]["prompt_tokens"] == answer.json["count"]
        closed = await call(server.port, "POST", "/tokenize", {**chat, "add_generation_prompt": False})
        assert closed.json["tokens"] == tokens[:-2]
        continued = {**chat, "messages": [*chat["messages"], {"role": "assistant", "content": "So"}],
                     "continue_final_message": True}  # fmt: skip
        open_ended = (await call(server.port, "POST", "/tokenize", continued)).json
        assert server.state.vocab.decode(open_ended["tokens"]).endswith("<|message|>So")
        explicit = {**continued, "add_generation_prompt": False}
        assert (await call(server.port, "POST", "/tokenize", explicit)).json == open_ended
        fault = await call(server.port, "POST", "/tokenize", {"messages": [{"role": "nobody"}]})
        assert fault.status == 400


# --------------------------------------------------------------------------- request heads


@pytest.mark.parametrize(
    ("target", "host", "status"),
    [
        (b"http://evil.example/health", b"localhost", 400),
        (b"http://evil.example:80/health", b"localhost", 400),
        (b"http://localhost@evil.example/health", b"localhost", 400),
        (b"http://localhost/health", b"localhost", 200),
        (b"http://localhost:8000/health", b"evil.example", 200),
        (b"http://[::1]:8000/health", b"localhost", 200),
        (b"/health", b"evil.example", 400),
        (b"//evil.example/health", b"localhost", 404),
    ],
)
async def test_a_host_in_the_target_replaces_the_header(target: bytes, host: bytes, status: int) -> None:
    async with served() as server:
        answer = await exchange(server.port, b"GET %s HTTP/1.1\r\nhost: %s\r\n\r\n" % (target, host))
        assert answer.status == status
        if status == 400:
            assert answer.code == "invalid_host"


@pytest.mark.parametrize(
    ("header", "value", "status"),
    [
        ("expect", "200-ok", 417),
        ("expect", "100-continue, 200-ok", 417),
        ("expect", "100-Continue", 200),
        ("content-type", "application/json; charset=utf-16", 415),
        ("content-type", 'application/json;charset="iso-8859-1"', 415),
        ("content-type", "application/json; charset=UTF-8", 200),
        ("content-type", 'application/json; charset="utf-8"; x=y', 200),
    ],
)
async def test_an_unsupported_header_value_is_refused(header: str, value: str, status: int) -> None:
    async with probed() as server:
        answer = await call(server.port, "POST", "/echo", {"a": 1}, {header: value})
        if answer.status == 100:
            return  # the final response follows
        assert answer.status == status
        codes = {417: "unsupported_expectation", 415: "unsupported_media_type"}
        assert status == 200 or answer.code == codes[status]


async def test_error_responses_do_not_repeat_long_paths() -> None:
    fills = ("a" * 60_000, "%22%5C" * 9_000, "conv_" + "0" * 60_000, "resp_" + "0" * 60_000)
    async with served() as server:
        paths = {(op.method, op.path) for op in OPERATIONS if "{" in op.path}
        paths |= {(method, "/{x}") for method in ("GET", "PUT", "OPTIONS", "M-SEARCH")}
        for method, path in paths:
            for fill in fills:
                long = re.sub(r"\{[^}]*\}", fill[: 60_000 // path.count("{")], path)
                answer = await call(server.port, method, long, {})
                assert answer.status in (400, 404, 405)
                assert len(answer.body) < 1_500, (method, path)


# --------------------------------------------------------------------------- OpenAPI, CORS, imports


async def test_the_openapi_document_lists_exactly_the_routes() -> None:
    async with make_state() as state:
        routed = {
            (method, route.path.replace(":path", ""))
            for route in all_routes(state)
            if isinstance(route, Route)  # OpenAPI cannot describe a WebSocket
            for method in (route.methods or set()) - {"HEAD"}
        }
    paths = describe(OPERATIONS)["paths"]
    described = {(method.upper(), path) for path, methods in paths.items() for method in methods}
    pages = ("/openapi.json", *DOCS_PATHS, *(path.replace(":path", "") for path in PAGE_PATHS))
    assert routed - described == {("GET", path) for path in pages}
    assert described <= routed


def test_every_reference_of_the_openapi_document_resolves() -> None:
    document = describe(OPERATIONS)
    found = re.findall(r'"\$ref": "#/components/schemas/([^"]+)"', json.dumps(document))
    assert set(found) <= set(document["components"]["schemas"])
    assert json.dumps(document).count('"$ref": "') == len(found) > 0


async def test_cors_is_off_by_default() -> None:
    preflight = {
        "origin": "https://a.example",
        "access-control-request-method": "POST",
        "access-control-request-headers": "content-type",
    }
    async with served() as server:
        answer = await call(server.port, "GET", "/version", None, {"origin": "https://a.example"})
        assert "access-control-allow-origin" not in answer.headers
        assert (await call(server.port, "OPTIONS", "/tokenize", None, preflight)).status == 405
    async with served(allowed_origins=("https://a.example",)) as server:
        assert (await call(server.port, "OPTIONS", "/tokenize", None, preflight)).status == 200


async def test_a_page_of_an_allowed_origin_can_read_errors_too() -> None:
    """Without the header a browser tells its page only that the request failed."""
    async with served(allowed_origins=("https://a.example",)) as server:
        origin = {"origin": "https://a.example"}
        for method, path, body, status in (
            ("GET", "/nope", None, 404),
            ("GET", "/v1/models/none", None, 404),
            ("POST", "/tokenize", {}, 400),
            ("DELETE", "/tokenize", None, 405),
        ):
            answer = await call(server.port, method, path, body, origin)
            allowed = answer.headers["access-control-allow-origin"]
            assert (answer.status, allowed) == (status, "https://a.example")
            exposed = answer.headers["access-control-expose-headers"].split(", ")
            assert {"retry-after", "request-id", "x-request-id"} <= set(exposed)
            other = await call(server.port, method, path, body, {"origin": "https://b.example"})
            assert "access-control-allow-origin" not in other.headers
    async with served(keys=(hash_key(KEY),), allowed_origins=("https://a.example",)) as server:
        answer = await call(server.port, "GET", "/v1/models", None, {"origin": "https://a.example"})
        assert (answer.status, answer.headers["access-control-allow-origin"]) == (401, "https://a.example")
