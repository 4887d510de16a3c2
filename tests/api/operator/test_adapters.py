"""Adapters over HTTP: named by ``model`` in each API, listed, and loaded at run time if that is allowed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from chorale.api.adapters import AdapterRegistry
from chorale.config.adapters import LoraModule
from chorale.engine.commands import Command, Outcome
from chorale.engine.types import BASE, AdapterRef
from chorale.errors import ConflictError
from tests.support.engine.scripted_client import ScriptedClient
from tests.support.scripted import playing
from tests.support.server import Server, served

TUNED = AdapterRef(1, "tuned", "/adapters/tuned")
MESSAGES = [{"role": "user", "content": "Hi"}]
BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": MESSAGES}),
    ("/v1/completions", {"prompt": "Hi"}),
    ("/v1/responses", {"input": "Hi"}),
    ("/v1/messages", {"messages": MESSAGES, "max_tokens": 5}),
    ("/inference/v1/generate", {"token_ids": [1, 2], "sampling_params": {"max_tokens": 5}}),
]


def tune(server: Server) -> None:
    registry = AdapterRegistry([LoraModule(TUNED.name, TUNED.path)])
    server.state.adapters._served.update(registry._served)


@pytest.mark.parametrize(("path", "body"), BODIES)
async def test_model_chooses_the_adapter(path: str, body: dict[str, Any]) -> None:
    async with served(playing("Hello")) as server:
        tune(server)
        status, answer = await server.post(path, **body, model="tuned")
        assert (status, answer["model"]) == (200, "tuned")
        base = server.state.model_names[0]
        status, answer = await server.post(path, **body)
        assert (status, answer["model"]) == (200, base)
        status, answer = await server.post(path, **body, model="other")
        assert (status, answer["error"].get("param", "model")) == (404, "model")
        assert [each.adapter for each in server.client.requests] == [TUNED, BASE]


async def test_models_lists_adapters_under_their_base() -> None:
    async with served(playing("")) as server:
        tune(server)
        base, *_, adapter = (await server.http.get("/v1/models")).json()["data"]
        assert (base["parent"], adapter["id"]) == (None, "tuned")
        assert (adapter["parent"], adapter["root"]) == (base["id"], "/adapters/tuned")
        assert (await server.http.get("/v1/models/tuned")).json()["parent"] == base["id"]


async def load(server: Server, path: Path | str, name: str = "a", **fields: Any) -> tuple[int, Any]:
    body = {"lora_name": name, "lora_path": str(path), **fields}
    answer = await server.http.post("/v1/load_lora_adapter", json=body)
    return answer.status_code, answer.text if answer.status_code == 200 else answer.json()["error"]


async def test_loading_and_unloading(tmp_path: Path) -> None:
    options: dict[str, Any] = {"enable_lora": True, "lora_updates": True, "lora_dirs": (str(tmp_path),)}
    folder = tmp_path / "x"
    async with served(playing("Hello"), **options) as server:
        status, text = await load(server, folder)
        assert (status, text) == (200, "Success: LoRA adapter 'a' added successfully.")
        (command,) = server.client.commands
        first = AdapterRef(command.adapter.id, "a", str(folder))
        assert command == Command(action="load_adapter", adapter=first)
        other = AdapterRegistry().new("b", "/b")
        assert abs(other.id - first.id) > 1, "another process for the same engines uses other ids"
        status, error = await load(server, folder)
        assert (status, error["param"]) == (400, "lora_name")
        assert (await load(server, folder, load_inplace=True))[0] == 200
        second = AdapterRef(first.id + 1, "a", str(folder))
        assert server.client.commands[1:] == [
            Command(action="load_adapter", adapter=second),
            Command(action="unload_adapter", adapter=first),
        ]
        await server.post("/v1/completions", prompt="Hi", model="a")
        assert server.client.requests[0].adapter == second, "new weights have a new id"
        answer = await server.http.post("/v1/unload_lora_adapter", json={"lora_name": "a"})
        assert answer.status_code == 200
        assert server.client.commands[-1] == Command(action="unload_adapter", adapter=second)
        assert (await server.post("/v1/completions", prompt="Hi", model="a"))[0] == 404
        answer = await server.http.post("/v1/unload_lora_adapter", json={"lora_name": "a"})
        assert answer.status_code == 404


async def test_what_may_not_be_loaded(tmp_path: Path) -> None:
    inside = tmp_path / "inside"
    inside.mkdir()
    (inside / "link").symlink_to(tmp_path)
    options: dict[str, Any] = {"enable_lora": True, "lora_updates": True, "lora_dirs": (str(inside),)}
    async with served(playing(""), **options) as server:
        for path in (tmp_path, inside / ".." / "x", inside / "link" / "x", "/etc"):
            status, error = await load(server, path)
            assert (status, error["param"]) == (403, "lora_path")
        for path in ("", "a\0b"):
            assert (await load(server, path))[0] == 400
        for name in ("", "line\nbreak", "x" * 257, server.state.model_names[0]):
            status, error = await load(server, inside, name)
            assert (status, error["param"]) == (400, "lora_name")
        assert server.client.commands == []


class RefusingClient(ScriptedClient):
    async def control(self, command: Command) -> Outcome:
        raise ConflictError("the adapter changes nothing")


async def test_the_engine_s_reason_reaches_the_client(tmp_path: Path) -> None:
    options: dict[str, Any] = {"enable_lora": True, "lora_updates": True, "lora_dirs": (str(tmp_path),)}
    async with served(RefusingClient(playing("").source), **options) as server:
        status, error = await load(server, tmp_path)
        assert (status, error["code"], error["param"]) == (400, "invalid_adapter", "lora_path")
        assert error["message"] == "the adapter changes nothing"
        assert "a" not in server.state.adapters


@pytest.mark.parametrize("options", [{}, {"enable_lora": True}, {"lora_updates": True}])
async def test_run_time_loading_is_off_by_default(tmp_path: Path, options: dict[str, Any]) -> None:
    async with served(playing(""), lora_dirs=(str(tmp_path),), **options) as server:
        assert (await load(server, tmp_path))[0] == 404
