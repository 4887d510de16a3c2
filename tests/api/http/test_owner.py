"""API keys as owners, on every endpoint: their names and weights, and separate prefix caches."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from chorale.api.app import all_routes
from chorale.api.http.auth import cache_salt
from chorale.config.engine import hash_key, owner_name
from chorale.engine.types import NOBODY, Owner
from tests.support.event_loop import until
from tests.support.local_client import on_fake_device
from tests.support.server import served

COMPLETIONS = "/v1/completions"
LONG = "the tide turned and the harbour filled " * 40
ENDPOINTS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": LONG}], "max_tokens": 2},
    "/v1/completions": {"prompt": LONG, "max_tokens": 2},
    "/v1/responses": {"input": LONG, "max_output_tokens": 2, "store": False},
    "/v1/messages": {"model": "demo", "messages": [{"role": "user", "content": LONG}], "max_tokens": 2},
}


def cached(body: dict[str, Any]) -> int:
    usage = body["usage"]
    for name in ("prompt_tokens_details", "input_tokens_details"):
        if name in usage:
            return int(usage[name]["cached_tokens"])
    return int(usage["cache_read_input_tokens"])


@pytest.mark.parametrize("path", ENDPOINTS)
async def test_a_key_shares_the_prefix_cache_only_with_itself(path: str) -> None:
    keys = [hash_key(key) for key in ("one", "two")]
    async with on_fake_device() as client, served(client, keys=keys) as server:

        async def ask(key: str, **more: Any) -> int:
            headers = {"Authorization": f"Bearer {key}"}
            response = await server.http.post(path, json={**ENDPOINTS[path], **more}, headers=headers)
            assert response.status_code == 200, response.text
            return cached(response.json())

        assert await ask("one") == 0
        shared = await ask("one")
        assert shared > 200  # a key shares with itself
        assert await ask("two") == 0
        assert await ask("two") == shared
        assert await ask("one", cache_salt="mine") == 0  # the client's salt separates requests of one key
        assert await ask("two", cache_salt="mine") == 0
        assert await ask("one", cache_salt="mine") == shared


@pytest.mark.parametrize("path", [*ENDPOINTS, "background", "batch"])
async def test_the_engine_receives_the_owner_of_each_request(path: str, tmp_path: Path) -> None:
    one, two = (owner_name(hash_key(key)) for key in ("one", "two"))
    keys = [hash_key(key) for key in ("one", "two")]
    store = str(tmp_path / "store.sqlite3")
    async with served(keys=keys, key_weights={one: 2.5}, response_store=store) as server:
        for key in ("one", "two"):
            headers = {"authorization": f"Bearer {key}"}
            sdk = server.sdk.with_options(api_key=key)
            if path == "batch":
                line = {
                    "custom_id": "a",
                    "method": "POST",
                    "url": COMPLETIONS,
                    "body": ENDPOINTS[COMPLETIONS],
                }
                file = await sdk.files.create(file=("a", json.dumps(line).encode()), purpose="batch")
                await sdk.batches.create(input_file_id=file.id, endpoint=COMPLETIONS, completion_window="24h")
            elif path == "background":
                await sdk.responses.create(model="demo", input="hi", background=True)
            else:
                answer = await server.http.post(path, json=ENDPOINTS[path], headers=headers)
                assert answer.status_code == 200, answer.text
        await until(lambda: len(server.client.requests) >= 2)
        owners = {request.owner for request in server.client.requests}
        assert owners == {Owner(one, 2.5), Owner(two, 1.0)}


async def test_a_server_without_keys_has_one_owner() -> None:
    async with served() as server:
        await server.complete()
        assert server.client.requests[0].owner == NOBODY


def test_the_salt_of_a_server_without_keys_is_the_clients_own() -> None:
    assert cache_salt(b"", None) == ""
    assert cache_salt(b"", "mine") == "mine"
    salts = [cache_salt(hash_key(key), asked) for key in ("one", "two") for asked in (None, "mine")]
    assert len(set(salts)) == 4
    assert not any(hash_key(key).hex() in salt for key in ("one", "two") for salt in salts)


async def test_stored_objects_are_hidden_from_other_keys() -> None:
    mine, theirs = ({"authorization": f"Bearer {key}"} for key in ("one", "two"))
    item = {"type": "message", "role": "user", "content": "secret"}
    keys = [hash_key(key) for key in ("one", "two")]
    async with served(keys=keys) as server:

        async def made(path: str, **body: Any) -> str:
            found: str = (await server.http.post(path, json=body, headers=mine)).json()["id"]
            return found

        ids = {
            "response_id": await made("/v1/responses", input="hi"),
            "conversation_id": await made("/v1/conversations", items=[item]),
            "completion_id": await made("/v1/chat/completions", messages=[item], store=True),
        }
        own = [f"/v1/responses/{ids['response_id']}", f"/v1/conversations/{ids['conversation_id']}/items",
               f"/v1/chat/completions/{ids['completion_id']}"]  # fmt: skip
        answers = [await server.http.get(path, headers=mine) for path in own]
        assert [answer.status_code for answer in answers] == [200] * 3
        ids["item_id"] = answers[1].json()["data"][0]["id"]
        routes: list[Any] = [route for route in all_routes(server.state) if "_id}" in route.path]
        asked = [(method, each.path) for each in routes for method in each.methods - {"HEAD"}]
        assert len(asked) > 15
        for method, path in asked:
            if "file_id" in path or "batch_id" in path:  # see tests/api/batches
                continue
            sent = {"json": {"metadata": {}, "items": [item]}} if method == "POST" else {}
            answer = await server.http.request(method, path.format(**ids), headers=theirs, **sent)
            assert answer.status_code == 404, (method, path)
        for name, given in (("previous_response_id", "response_id"), ("conversation", "conversation_id")):
            body = {"input": "x", name: ids[given]}
            assert (await server.http.post("/v1/responses", json=body, headers=theirs)).status_code == 404
        assert (await server.http.get("/v1/chat/completions", headers=theirs)).json()["data"] == []
