"""The render endpoints return the ids that the engine gets, and the errors of the endpoints they mirror."""

from __future__ import annotations

from typing import Any

import pytest

from chorale.config.engine import hash_key
from tests.support.engine.scripted_client import Script, ScriptedClient
from tests.support.raw_http import call
from tests.support.server import VOCAB, served

USER = [{"role": "user", "content": "What is 17 + 25?"}]


async def test_a_rendered_request_has_the_form_of_vllms() -> None:
    """``tests/api/tokens/test_generate.py`` compares what the engine gets."""
    options = {"include_usage": True}
    async with served(ScriptedClient(lambda request, index: Script(()))) as server:
        body = {"messages": USER, "stream": True, "stream_options": options, "stop": ["x"], "max_tokens": 7}
        found = (await server.http.post("/v1/chat/completions/render", json=body)).json()
        assert (found["model"], found["stream"], found["stream_options"]) == ("demo", True, options)
        assert found["features"] is found["kv_transfer_params"] is None
        assert found["reasoning_ended"] is False
        assert (found["sampling_params"]["stop"], found["sampling_params"]["max_tokens"]) == (["x"], 7)


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


async def test_a_rendered_request_has_the_salt_of_its_key() -> None:
    """Requests of different keys share no blocks."""
    async with served(keys=[hash_key(key) for key in ("one", "two")]) as server:
        salts = []
        for key in ("one", "two"):
            headers = {"authorization": f"Bearer {key}"}
            answer = await server.http.post("/v1/completions/render", json={"prompt": "x"}, headers=headers)
            salts.append(answer.json()[0]["cache_salt"])
        assert None not in salts
        assert salts[0] != salts[1]
