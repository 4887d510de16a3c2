"""What an operator's words become: chosen tools, reasons for those that are missing, boxes for responses."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import pytest

import chorale.tools.service as service_module
from chorale.config.engine import ToolConfig
from chorale.errors import ConfigError
from chorale.tools.contract import CodeInterpreterRequest, RequestTools, WebSearchRequest
from chorale.tools.python.wasm import module as interpreter
from chorale.tools.service import container_id, probe_tools
from tests.support.event_loop import run, until
from tests.support.ports import free_port
from tests.support.tools.drive import box_of, cite, drive, service_of
from tests.support.tools.sdk_server import sdk_server

BOTH = RequestTools(web_search=WebSearchRequest(), code_interpreter=CodeInterpreterRequest())


async def test_tools_are_off_by_default_except_servers_of_requests() -> None:
    async with service_of() as service, box_of(service, BOTH) as box:
        assert set(service.available) == {"mcp"}
        assert box.recipients == frozenset()
        assert not box.owns("python")
        assert cite(box.citation_stream(), "x【0†L1】")[0] == "x【0†L1】"


async def test_the_demo_tools_work_and_keep_their_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if shutil.which("uv") is None:
        pytest.skip("uv is not installed")
    environment = {"PYTHON_EXECUTION_BACKEND": "UV"}  # the name that the first recipes print
    async with service_of(environment, servers=("demo",)) as service:
        assert service.available["browser"].startswith("offline, ")
        assert "NOT isolated" in service.available["python"]
        async with box_of(service, BOTH) as box:
            assert [namespace.name for namespace in box.system_namespaces] == ["browser", "python"]
            assert box.recipients == {"browser.search", "browser.open", "browser.find", "python"}
            _, found = await drive(box.call, "browser.search", {"query": "weight of sea otters"})
            assert "sea-otters" in str(found.detail)
            await drive(box.call, "python", "x = 20")
            state = json.loads(json.dumps(box.state()))
        async with box_of(service, BOTH, state) as again:
            _, result = await drive(again.call, "python", "x + 1")
            assert result.content == "21\n"
            _, slip = await drive(again.call, "python.run", "x + 2")
            assert slip.content == "22\n"
            assert again.identify("browser.open").kind == "browser"


async def test_a_chain_is_told_that_its_session_is_lost() -> None:
    gone = {"python": {"container": "cntr_" + "0" * 48}}
    named = RequestTools(code_interpreter=CodeInterpreterRequest("cntr_" + "a" * 48))
    async with service_of(python="auto") as service:
        if "python" not in service.available:
            pytest.skip(service.missing["python"])
        for request, start in ((BOTH, "[a new session"), (named, "1\n")):
            async with box_of(service, request, gone) as box:
                _, result = await drive(box.call, "python", "1")
                assert result.content.startswith(start)


@pytest.mark.parametrize(
    "state", [{"browser": 3}, {"python": 3}, {"python": {"container": "../x"}}, {"x": 1}]
)
async def test_invalid_states_are_ignored(state: dict[str, object]) -> None:
    async with service_of(browser="offline") as service, box_of(service, BOTH, state) as box:
        _, found = await drive(box.call, "browser.search", {"query": "kelp"})
        assert found.content.startswith("[0] ")


def test_hostile_container_names_are_replaced() -> None:
    assert container_id("cntr_" + "ab" * 24) == "cntr_" + "ab" * 24
    for hostile in ("../../etc", "--privileged", "a b", "\x00", "é"):
        made = container_id(hostile)
        assert made.startswith("cntr_")
        assert made[5:].isalnum()
        assert made == container_id(hostile)
    assert container_id(None) != container_id("auto")


@pytest.mark.parametrize(
    ("config", "environment", "reason"),
    [
        ({"browser": "exa"}, {}, "EXA_API_KEY"),
        ({"browser": "you"}, {}, "YDC_API_KEY"),
        ({"browser": "searxng"}, {}, "--browser-tool-url"),
        ({"browser": "searxng", "search_url": "ftp://x/search"}, {}, "--browser-tool-url ftp://x/search"),
        ({"browser": "searxng", "search_url": "localhost:8080"}, {}, "--browser-tool-url localhost:8080"),
        ({"browser": "offline", "offline_pages": "/nonexistent"}, {}, "does not exist"),
        (
            {"servers": ("demo",)},
            {"PYTHON_EXECUTION_BACKEND": "dangerously_use_local_jupyter"},
            "not offered",
        ),
        ({"servers": ("demo",)}, {"PYTHON_EXECUTION_BACKEND": "nonsense"}, "not one of"),
        ({"servers": ("nonsense",)}, {}, "a port is missing"),
        ({"mcp_config": "/nonexistent"}, {}, "No such file"),
    ],
)
async def test_options_that_cannot_work_are_refused_at_start(
    config: dict[str, object], environment: dict[str, str], reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        async with service_of(environment, **config):
            pass


@pytest.mark.parametrize(
    ("config", "keys", "available"),
    [
        ({"python": "none", "browser": "none"}, {}, {}),
        ({"python": "none"}, {"EXA_API_KEY": "k"}, {"browser": "exa, pages from the web"}),
        (
            {},
            {"YDC_API_KEY": "k", "TAVILY_API_KEY": "t", "PYTHON_EXECUTION_BACKEND": "none"},
            {"browser": "you, pages from the web"},
        ),
    ],
)
async def test_options_and_keys_select_the_demo_tools(
    config: dict[str, object], keys: dict[str, str], available: dict[str, str]
) -> None:
    async with service_of(keys, servers=("demo",), **config) as service:
        assert {**service.available, "mcp": ""} == available | {"mcp": ""}


async def test_a_missing_program_is_reported_without_an_error(tmp_path: Path) -> None:
    (tmp_path / "here").write_text("#!/bin/sh\n")
    (tmp_path / "here").chmod(0o755)
    file = tmp_path / "mcp.json"
    servers = {"good": {"command": "here"}, "bad": {"command": "nowhere", "args": ["-y"]}}
    file.write_text(json.dumps({"mcpServers": servers}))
    async with service_of({"PATH": str(tmp_path)}, mcp_config=str(file)) as service:
        assert service.available["good"] == "MCP program"
        assert service.missing == {"bad": "its program 'nowhere' is not installed"}


def _not_installed() -> None:
    raise interpreter.ModuleMissing("the package wasmtime is not installed")


def test_a_missing_sandbox_is_reported_without_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.setattr(interpreter, "find", _not_installed)
    found = run(probe_tools(ToolConfig(servers=("demo",)), {}, patient=True))
    assert "browser" in found.available
    for part in (
        "pip install -e '.[python-tool]'",
        "bubblewrap: bwrap is not installed (apt install bubblewrap)",
    ):
        assert part in found.missing["python"]


async def test_a_tool_server_that_starts_later_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_module, "_SEEK_SECONDS", 0.05)
    port = free_port()
    async with service_of(servers=(f"127.0.0.1:{port}",)) as service:
        assert f"127.0.0.1:{port}" in service.missing
        async with sdk_server(port=port):
            await until(lambda: f"127.0.0.1:{port}" not in service.missing)
            assert "sample" in service.available


async def test_a_bug_in_a_tool_gives_a_failed_result(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def broken(*_: object) -> None:
        raise ZeroDivisionError("of ours")

    async with service_of(browser="offline") as service, box_of(service, BOTH) as box:
        monkeypatch.setattr(service._backend, "search", broken)
        _, result = await drive(box.call, "browser.search", {"query": "x"})
        assert result.failed
        assert result.content == "Error: the tool failed (ZeroDivisionError)"
    assert "the tool browser.search failed" in caplog.text
