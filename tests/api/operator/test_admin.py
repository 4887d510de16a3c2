"""The administrative endpoints: what each tells the engines, who may use them, and what clients read."""

from __future__ import annotations

from typing import Any

import httpx2
import msgspec
import pytest

from chorale.config.engine import hash_key
from chorale.engine.commands import Command
from tests.support.scripted import playing
from tests.support.server import served


async def ask(method: str, url: str, **options: Any) -> tuple[httpx2.Response, list[Command]]:
    """Returns the response, and the commands to the engine."""
    given = {key: options.pop(key) for key in ("json", "headers") if key in options}
    client = playing("")
    client.info_value = msgspec.structs.replace(
        client.info_value,
        max_model_len=1000,
        tensor_parallel_size=2,
        has_profiler=options.pop("profiler", False),
    )
    async with served(client, **options) as server:
        return await server.http.request(method, url, **given), client.commands


@pytest.mark.parametrize(
    ("url", "command", "answer"),
    [
        ("/pause", {"action": "pause"}, {"status": "paused"}),
        ("/pause?mode=keep", {"action": "pause", "mode": "keep"}, {"status": "paused"}),
        ("/pause?clear_cache=false", {"action": "pause", "clear_cache": False}, {"status": "paused"}),
        ("/resume", {"action": "resume"}, {"status": "resumed"}),
        ("/sleep", {"action": "sleep"}, {"status": "sleeping", "level": 1}),
        (
            "/sleep?level=2&mode=wait",
            {"action": "sleep", "level": 2, "mode": "wait"},
            {"status": "sleeping", "level": 2},
        ),
        ("/wake_up", {"action": "wake_up"}, {"status": "awake", "tags": None}),
        (
            "/wake_up?tags=weights&tags=kv_cache",
            {"action": "wake_up", "tags": ("weights", "kv_cache")},
            {"status": "awake", "tags": ["weights", "kv_cache"]},
        ),
        ("/reset_prefix_cache", {"action": "reset_prefix_cache"}, {"success": True}),
        (
            "/reset_prefix_cache?reset_running_requests=true&reset_external=true",
            {"action": "reset_prefix_cache", "preempt": True},
            {"success": True},
        ),
    ],
)
async def test_each_endpoint_gives_its_command(
    url: str, command: dict[str, Any], answer: dict[str, Any]
) -> None:
    response, commands = await ask("POST", url)
    assert (response.status_code, response.json()) == (200, answer)
    assert commands == [Command(**command)]


@pytest.mark.parametrize(
    ("url", "param"),
    [
        ("/pause?mode=stop", "mode"),
        ("/pause?clear_cache=maybe", "clear_cache"),
        ("/sleep?level=3", "level"),
        ("/sleep?mode=", "mode"),
        ("/wake_up?tags=weights&tags=lora", "tags"),
        ("/reset_prefix_cache?reset_external=2", "reset_external"),
    ],
)
async def test_a_wrong_value_is_refused_before_the_engine_is_told(url: str, param: str) -> None:
    response, commands = await ask("POST", url)
    assert (response.status_code, response.json()["error"]["param"]) == (400, f"query.{param}")
    assert not commands


@pytest.mark.parametrize(
    ("options", "is_on"),
    [
        ({}, True),
        ({"host": "::1"}, True),
        ({"host": "0.0.0.0"}, False),
        ({"host": "::"}, False),
        ({"host": "gpu-server"}, False),
        ({"host": "0.0.0.0", "admin_endpoints": "on"}, True),
        ({"host": "0.0.0.0", "keys": (hash_key("k"),), "api_key": "k"}, True),
        ({"admin_endpoints": "off"}, False),
        ({"admin_endpoints": "off", "keys": (hash_key("k"),), "api_key": "k"}, False),
    ],
)
async def test_where_the_endpoints_are_on(options: dict[str, Any], is_on: bool) -> None:
    response, commands = await ask("POST", "/pause", **options)
    assert response.status_code == (200 if is_on else 404)
    assert bool(commands) is is_on


async def test_the_state_is_that_of_the_engines() -> None:
    client = playing("")
    async with served(client) as server:
        for url, paused, sleeping in (
            ("/pause", True, False),
            ("/sleep", True, True),
            ("/wake_up", False, False),
        ):
            await server.http.post(url)
            assert (await server.http.get("/is_paused")).json() == {"is_paused": paused}
            assert (await server.http.get("/is_sleeping")).json() == {"is_sleeping": sleeping}


@pytest.mark.parametrize(
    ("query", "size"), [("", 6), ("?include_dp=false", 2)], ids=["replicas", "one replica"]
)
async def test_the_world_size_counts_ranks(query: str, size: int) -> None:
    response, _ = await ask("GET", f"/get_world_size{query}", data_parallel_size=3)
    assert response.json() == {"world_size": size}


async def test_server_info_has_what_trl_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "info")
    response, _ = await ask("GET", "/server_info?config_format=json", data_parallel_size=3)
    found = response.json()
    assert found["vllm_config"]["weight_transfer_config"] is found["vllm_config"]["lora_config"] is None
    assert found["vllm_config"]["model_config"]["logprobs_mode"] == "raw_logprobs"
    assert found["vllm_config"]["model_config"]["max_model_len"] == 1000
    assert found["vllm_config"]["parallel_config"]["data_parallel_size"] == 3
    assert found["vllm_env"]["VLLM_LOGGING_LEVEL"] == "info"
    assert "secret" not in response.text
    text, _ = await ask("GET", "/server_info")
    assert isinstance(text.json()["vllm_config"], str)


@pytest.mark.parametrize("path", ["/start_profile", "/stop_profile"])
async def test_the_profiler_needs_its_option(path: str) -> None:
    response, commands = await ask("POST", path)
    assert (response.status_code, commands) == (404, [])
    response, commands = await ask("POST", path, profiler=True)
    assert (response.status_code, commands) == (200, [Command(action=path[1:])])


async def test_a_request_cannot_choose_where_a_trace_is_written() -> None:
    response, commands = await ask(
        "POST", "/start_profile", profiler=True, json={"profile_prefix": "../../x", "max_iterations": None}
    )
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["code"]) == (
        400,
        "profile_prefix",
        "unsupported_value",
    )
    assert not commands
