"""The render endpoints return the ids that the engine gets, and the errors of the endpoints they mirror."""

from __future__ import annotations

from typing import Any

import pytest

from chorale.api.app import create_app
from chorale.config.engine import hash_key
from tests.support.engine.scripted_client import Script, ScriptedClient
from tests.support.raw_http import call
from tests.support.server import VOCAB, listening, make_state, served

USER = [{"role": "user", "content": "What is 17 + 25?"}]
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
CHATS: list[dict[str, Any]] = [
    {"messages": USER},
    {"messages": USER, "stream": True, "stream_options": {"include_usage": True}, "n": 2, "max_tokens": 7},
    {"messages": USER, "tools": [TOOL], "tool_choice": "required", "reasoning_effort": "high"},
    {
        "messages": USER,
        "response_format": {"type": "json_object"},
        "temperature": 0,
        "seed": 3,
        "stop": ["x"],
    },
    {
        "messages": [*USER, {"role": "assistant", "content": "It is"}],
        "continue_final_message": True,
        "add_generation_prompt": False,
        "cache_salt": "mine",
        "priority": 2,
    },
]
COMPLETIONS: list[dict[str, Any]] = [
    {"prompt": "One, two,"},
    {"prompt": ["One,", "<|start|>user"], "max_tokens": 3, "cache_salt": "mine"},
    {"prompt": [1, 2, 3], "logprobs": 2},
    {"prompt": [[1, 2], [3]], "n": 2},
]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_the_engine_gets_the_rendered_prompts(path: str) -> None:
    seen: list[Any] = []

    def source(request: Any, index: int) -> Script:
        if index == 0:
            seen.append(request)
        return Script((200005, 17196, 200008, 13225, 200002))

    async with make_state(ScriptedClient(source)) as state, listening(create_app(state)) as server:
        for body in CHATS if "chat" in path else COMPLETIONS:
            answer = await call(server.port, "POST", f"{path}/render", body)
            assert answer.status == 200, answer.body
            assert not seen  # nothing was run
            found = answer.json if isinstance(answer.json, list) else [answer.json]
            assert (path == "/v1/completions") == isinstance(answer.json, list)
            assert (await call(server.port, "POST", path, body)).status == 200
            assert [each["token_ids"] for each in found] == [each.prompt_token_ids for each in seen]
            for each, request in zip(found, seen, strict=True):
                check_request(each, request, body)
            seen.clear()


def check_request(found: dict[str, Any], request: Any, body: dict[str, Any]) -> None:
    sampling = found["sampling_params"]
    assert (found["cache_salt"] or "") == request.cache_salt == body.get("cache_salt", "")
    assert found["priority"] == request.priority == body.get("priority", 0)
    assert found["stream"] is bool(body.get("stream"))
    assert found["stream_options"] == body.get("stream_options")
    assert found["model"] == "demo"
    assert (found["features"], found["kv_transfer_params"]) == (None, None)
    assert found["reasoning_ended"] is False
    for name in ("n", "temperature", "top_p", "max_tokens", "seed", "logprobs"):
        assert sampling[name] == getattr(request.sampling, name)
    assert sampling["stop"] == body.get("stop", [])


async def test_the_offsets_of_tokens_are_returned_on_request() -> None:
    text = "Hé 🧑‍🚀 漢字"
    async with served(ScriptedClient(lambda request, index: Script(()))) as server:

        async def render(path: str, **body: Any) -> Any:
            return (await server.http.post(f"/v1/{path}/render", json=body)).json()

        (found,) = await render("completions", prompt=text, return_token_offsets=True)
        for ids, (begin, end) in zip(found["token_ids"], found["token_offsets"], strict=True):
            assert VOCAB.token_bytes(ids) in text[begin:end].encode()
        assert (found["token_offsets"][0][0], found["token_offsets"][-1][1]) == (0, len(text))
        assert len(found["token_offsets"]) > len(text.split()) + 1  # some tokens are parts of characters
        chat = await render("chat/completions", messages=USER, return_token_offsets=True)
        places = dict(zip(chat["token_ids"], map(tuple, chat["token_offsets"]), strict=True))
        assert chat["token_offsets"][0] == [0, len("<|start|>")]
        assert places[VOCAB.encode("?")[0]][1] - places[VOCAB.encode("What")[0]][0] == len(USER[0]["content"])
        unasked = [await render("chat/completions", messages=USER)]
        unasked += await render("completions", prompt=text)
        unasked += await render("completions", prompt=[1, 2], return_token_offsets=True)
        assert [each["token_offsets"] for each in unasked] == [None] * 3


@pytest.mark.parametrize(
    ("path", "body", "prefix"),
    [
        ("chat/completions", {"messages": USER}, "chatcmpl-"),
        ("completions", {"prompt": "x"}, "cmpl-"),
        ("completions", {"prompt": ["x", "y"]}, "cmpl-"),
    ],
)
async def test_a_rendered_request_has_the_clients_id(path: str, body: dict[str, Any], prefix: str) -> None:
    async with served(ScriptedClient(lambda request, index: Script(()))) as server:

        async def render(headers: dict[str, str] | None = None, **fields: Any) -> list[str]:
            answer = await server.http.post(f"/v1/{path}/render", json={**body, **fields}, headers=headers)
            found = answer.json()
            return [each["request_id"] for each in (found if isinstance(found, list) else [found])]

        ends = ["-0", "-1"] if isinstance(body.get("prompt"), list) else [""]
        assert await render(request_id="abc") == [f"{prefix}abc{end}" for end in ends]
        assert await render({"X-Request-Id": "top"}, request_id="abc") == [
            f"{prefix}top{end}" for end in ends
        ]
        assert (await render())[0] != (await render())[0]
        refused = await server.http.post(f"/v1/{path}/render", json={**body, "request_id": 5})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "request_id")


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("chat/completions", {"messages": []}, 400),
        ("chat/completions", {"messages": USER, "model": "other"}, 404),
        ("chat/completions", {"messages": [{"role": "user", "content": "x " * 140_000}]}, 400),
        ("chat/completions", {"messages": USER, "tool_choice": "required"}, 400),
        ("completions", {"prompt": ""}, 400),
        ("completions", {"prompt": [1, 300_000]}, 400),
        ("completions", {"prompt": "x", "model": "other"}, 404),
    ],
)
async def test_errors_equal_the_mirrored_endpoints(path: str, body: dict[str, Any], status: int) -> None:
    async with served(unknown_fields="refuse", listens=True) as server:
        rendered = await call(server.port, "POST", f"/v1/{path}/render", body)
        itself = await call(server.port, "POST", f"/v1/{path}", body)
        assert (rendered.status, rendered.json["error"]) == (itself.status, itself.json["error"])
        assert rendered.status == status


async def test_rendering_needs_post_and_an_api_key() -> None:
    async with make_state() as state:
        hashes = tuple(map(hash_key, ("one", "two")))
        async with listening(create_app(state, api_key_hashes=hashes)) as server:
            path, body = "/v1/completions/render", {"prompt": "x"}
            assert (await call(server.port, "POST", path, body)).status == 401
            salts = []
            for key in ("one", "two"):
                answer = await call(server.port, "POST", path, body, {"authorization": f"Bearer {key}"})
                salts.append(answer.json[0]["cache_salt"])
            assert None not in salts
            assert salts[0] != salts[1]  # keys have different salts, so they share no blocks
            metrics = (await call(server.port, "GET", "/metrics")).body.decode()
            assert f'http_requests_total{{handler="{path}",method="POST",status="2xx"}} 2.0' in metrics
    async with served(listens=True) as server:
        assert (await call(server.port, "GET", "/v1/completions/render")).status == 405
