"""The endpoints of weight transfer: what each tells the engines, and what answers say about the weights."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from chorale.client.base import EngineInfo
from chorale.engine.commands import Command, Outcome
from chorale.engine.types import TokenChunk
from chorale.errors import ConflictError
from tests.support.engine.scripted_client import ScriptedClient
from tests.support.scripted import changing, events_of, ids, playing
from tests.support.server import Server, served

INIT, UPDATE = "init_weight_transfer_engine", "update_weights"


INFO = EngineInfo(model="scripted", max_model_len=1000, max_num_seqs=8, weight_transfer="checkpoint")


def engine(info: EngineInfo = INFO) -> ScriptedClient:
    client = playing("")
    client.info_value = info
    return client


@pytest.mark.parametrize(
    ("path", "body", "fields"),
    [
        (INIT, {"init_info": {"packed": True}}, {"info": {"packed": True}}),
        ("shutdown_weight_transfer_engine", None, {}),
        ("start_weight_update", None, {}),
        ("start_weight_update", {"is_checkpoint_format": True}, {}),
        (UPDATE, {"update_info": {"path": "/a"}}, {"info": {"path": "/a"}}),
        ("finish_weight_update", None, {}),
        ("finish_weight_update", {"weight_version": "7"}, {"version": "7"}),
        ("update_weight_version", {"new_version": "7"}, {"version": "7"}),
    ],
)
async def test_each_endpoint_gives_its_command(path: str, body: Any, fields: dict[str, Any]) -> None:
    first = [Command(action="prepare_weight_update")] if path == "finish_weight_update" else []
    async with served(engine()) as server:
        response = await server.http.post(f"/{path}", json=body)
        assert response.status_code == 200, response.text
        assert server.client.commands == [*first, Command(action=path, **fields)]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (INIT, {}, "init_info"),
        (UPDATE, {"update_info": [{}]}, "update_info"),
        ("finish_weight_update", {"weight_version": 7}, "weight_version"),
        ("update_weight_version", {"new_version": ""}, "new_version"),
        ("update_weight_version", {"new_version": "x" * 257}, "new_version"),
    ],
)
async def test_a_wrong_value_is_refused_before_the_engine_is_told(path: str, body: Any, param: str) -> None:
    async with served(engine()) as server:
        response = await server.http.post(f"/{path}", json=body)
        assert (response.status_code, response.json()["error"]["param"]) == (400, param)
        assert not server.client.commands


async def test_without_a_back_end_there_are_no_updates() -> None:
    async with served(engine(msgspec.structs.replace(INFO, weight_transfer=""))) as server:
        for path in ("start_weight_update", "finish_weight_update", "shutdown_weight_transfer_engine"):
            assert (await server.http.post(f"/{path}")).status_code == 404
        assert not server.client.commands
        assert (await server.http.get("/weight_info")).json() == {"weight_version": "default"}


class Refusing(ScriptedClient):
    """Engines of which one has not got all tensors."""

    async def control(self, command: Command) -> Outcome:
        outcome = await super().control(command)
        if command.action == "prepare_weight_update":
            raise ConflictError("a tensor is missing")
        return msgspec.structs.replace(outcome, weight_version="")


async def test_if_one_engine_refuses_all_give_the_update_up() -> None:
    async with served(Refusing(playing("").source, INFO)) as server:
        response = await server.http.post("/finish_weight_update")
        assert (response.status_code, response.json()["error"]["code"]) == (409, "conflict")
        actions = [command.action for command in server.client.commands]
        assert actions == ["prepare_weight_update", "abandon_weight_update"]
        assert (await server.http.get("/weight_info")).status_code == 409  # they differ


TEXT = "<|channel|>final<|message|>one two three<|return|>"


def labelled() -> Any:
    """The first token comes from weights "a", all from the third on from "b"."""
    first, third = ids(TEXT)[0], ids(TEXT)[3]

    def label(request: Any, chunk: TokenChunk) -> None:
        if chunk.token_ids and chunk.token_ids[0] in (first, third):
            chunk.weight_version = "a" if chunk.token_ids[0] == first else "b"

    return changing(TEXT, label)


async def spans(server: Server, *, stream: bool, **fields: Any) -> Any:
    chat = await server.chat(stream=stream, **fields)
    choices = [c for e in events_of(chat) for c in e["choices"]] if stream else chat.json()["choices"]
    found = [choice["weight_versions"] for choice in choices if "weight_versions" in choice]
    assert len(found) <= 1
    return found[0] if found else None


async def test_answers_tell_which_weights_gave_which_tokens() -> None:
    count = len(ids(TEXT))
    expected = [{"version": "a", "start": 0, "end": 3}, {"version": "b", "start": 3, "end": count}]
    async with served(labelled()) as server:
        for stream in (False, True):
            assert await spans(server, stream=stream, return_weight_versions=True) == expected
            assert await spans(server, stream=stream) is None
        asked = {"max_tokens": 50, "return_weight_versions": True}
        text = (await server.complete("a", **asked)).json()["choices"][0]
        assert text["weight_versions"] == expected
        chunks = events_of(await server.complete("a", stream=True, **asked))
        assert [c for e in chunks for c in e["choices"]][-1]["weight_versions"] == expected
        body = {"token_ids": [1, 2], "sampling_params": {"max_tokens": 50}}
        _, generated = await server.post("/inference/v1/generate", **body)
        assert generated["choices"][0]["weight_versions"] == expected
