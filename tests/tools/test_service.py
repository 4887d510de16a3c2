"""What an operator's words become: chosen tools, reasons for those that are missing, boxes for responses."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
from pathlib import Path

import pytest

import chorale.tools.service as service_module
from chorale.config.engine import ToolConfig
from chorale.errors import ConfigError
from chorale.tools.contract import (
    CodeInterpreterRequest,
    RequestTools,
    ToolBox,
    ToolService,
    WebSearchRequest,
)
from chorale.tools.python.wasm import module as interpreter
from chorale.tools.service import BuiltinToolService, container_id, probe_tools, start_tools
from tests.support.event_loop import run
from tests.support.tools.drive import cite, count_words, drive

BOTH = RequestTools(web_search=WebSearchRequest(), code_interpreter=CodeInterpreterRequest())


async def started(environment: dict[str, str] | None = None, **config: object) -> BuiltinToolService:
    return await start_tools(ToolConfig(**config), environment or {}, count_words)  # type: ignore[arg-type]


def test_nothing_is_on_by_itself_but_what_requests_bring() -> None:
    async def work() -> None:
        service: ToolService = await started()
        assert set(service.available) == {"mcp"}
        box: ToolBox = await service.open(BOTH, session_key="k")
        assert [(entry.kind, entry.reason) for entry in box.unavailable] == [
            ("browser", "not enabled"),
            ("python", "not enabled"),
        ]
        assert not box.owns("python")
        assert cite(box.citation_stream(), "x【0†L1】")[0] == "x【0†L1】"
        await box.aclose()
        await service.aclose()

    run(work())


def test_the_demo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if shutil.which("uv") is None:
        pytest.skip("uv is not installed")

    async def work() -> None:
        environment = {"PYTHON_EXECUTION_BACKEND": "UV"}  # the name that the first recipes print
        service = await started(environment, servers=("demo",))
        assert service.available["browser"].startswith("offline, ")
        assert "NOT isolated" in service.available["python"]
        box = await service.open(BOTH, session_key="k")
        assert [namespace.name for namespace in box.system_namespaces] == ["browser", "python"]
        assert box.recipients == {"browser.search", "browser.open", "browser.find", "python"}
        _, found = await drive(box.call, "browser.search", {"query": "weight of sea otters"})
        assert "sea-otters" in str(found.detail)
        await drive(box.call, "python", "x = 20")
        state = json.loads(json.dumps(box.state()))
        await box.aclose()
        again = await service.open(BOTH, session_key="k", state=state)
        _, result = await drive(again.call, "python", "x + 1")
        assert result.content == "21\n"
        _, slip = await drive(again.call, "python.run", "x + 2")
        assert slip.content == "22\n"
        assert again.identify("browser.open").kind == "browser"
        await again.aclose()
        await service.aclose()

    run(work())


def test_a_chain_whose_session_is_gone_is_told_so() -> None:
    async def work() -> None:
        service = await started(python="auto")
        if "python" not in service.available:
            await service.aclose()
            pytest.skip(service.missing["python"])
        gone = {"python": {"container": "cntr_" + "0" * 48}}
        box = await service.open(BOTH, session_key="k", state=gone)
        _, result = await drive(box.call, "python", "1")
        assert result.content.startswith("[a new session")
        await box.aclose()
        named = RequestTools(code_interpreter=CodeInterpreterRequest("cntr_" + "a" * 48))
        box = await service.open(named, session_key="k", state=gone)
        _, result = await drive(box.call, "python", "1")
        assert result.content == "1\n"
        await box.aclose()
        await service.aclose()

    run(work())


@pytest.mark.parametrize(
    "state", [{"browser": 3}, {"python": 3}, {"python": {"container": "../x"}}, {"x": 1}]
)
def test_states_that_are_not_ours_do_no_harm(state: dict[str, object]) -> None:
    async def work() -> None:
        service = await started(browser="offline")
        box = await service.open(BOTH, session_key="k", state=state)
        _, found = await drive(box.call, "browser.search", {"query": "kelp"})
        assert found.content.startswith("[0] ")
        await box.aclose()
        await service.aclose()

    run(work())


def test_names_of_containers_are_harmless() -> None:
    assert container_id("cntr_" + "ab" * 24) == "cntr_" + "ab" * 24
    for hostile in ("../../etc", "--privileged", "a b", "\x00", "é"):
        made = container_id(hostile)
        assert made.startswith("cntr_")
        assert made[5:].isalnum()
        assert made == container_id(hostile)
    assert container_id(None) != container_id("auto")


def test_an_explicit_none_wins_over_demo() -> None:
    async def work() -> None:
        service = await started(servers=("demo",), python="none", browser="none")
        assert set(service.available) <= {"mcp"}
        await service.aclose()

    run(work())


@pytest.mark.parametrize(
    ("config", "environment", "reason"),
    [
        ({"browser": "exa"}, {}, "EXA_API_KEY"),
        ({"browser": "you"}, {}, "YDC_API_KEY"),
        ({"browser": "searxng"}, {}, "--browser-tool-url"),
        (
            {"browser": "searxng", "search_url": "ftp://x/search"},
            {},
            "--browser-tool-url ftp://x/search: only",
        ),
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
def test_what_can_never_run_is_refused_at_start(
    config: dict[str, object], environment: dict[str, str], reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        run(started(environment, **config))


def test_keys_choose_the_service_of_the_demo() -> None:
    async def name(**keys: str) -> str:
        service = await started({**keys, "PYTHON_EXECUTION_BACKEND": "none"}, servers=("demo",))
        await service.aclose()
        return service.available["browser"]

    assert run(name(EXA_API_KEY="k")) == "exa, pages from the web"
    assert run(name(YDC_API_KEY="k", TAVILY_API_KEY="t")) == "you, pages from the web"


def test_a_missing_program_is_a_line_not_an_error(tmp_path: Path) -> None:
    (tmp_path / "here").write_text("#!/bin/sh\n")
    (tmp_path / "here").chmod(0o755)
    file = tmp_path / "mcp.json"
    servers = {"good": {"command": "here"}, "bad": {"command": "nowhere", "args": ["-y"]}}
    file.write_text(json.dumps({"mcpServers": servers}))

    async def lines() -> tuple[dict[str, str], dict[str, str]]:
        service = await started({"PATH": str(tmp_path)}, mcp_config=str(file))
        await service.aclose()
        return dict(service.available), dict(service.missing)

    available, missing = run(lines())
    assert available["good"] == "MCP program"
    assert missing == {"bad": "its program 'nowhere' is not installed"}


def _not_installed() -> None:
    raise interpreter.ModuleMissing("the package wasmtime is not installed")


def test_a_missing_sandbox_is_a_line_not_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.setattr(interpreter, "find", _not_installed)
    found = run(probe_tools(ToolConfig(servers=("demo",)), {}))
    assert "browser" in found.available
    assert found.missing["python"].startswith(
        "no sandbox works here; to add one: pip install '.[python-tool]'"
    )
    assert "bubblewrap: bwrap is not installed (apt install bubblewrap)" in found.missing["python"]


def test_a_tool_server_that_starts_later_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_module, "_SEEK_SECONDS", 0.05)

    async def work() -> None:
        service = await started(servers=("127.0.0.1:1",))
        assert "could not be reached" in service.missing["127.0.0.1:1"]
        await asyncio.sleep(0.2)
        await service.aclose()

    run(work())


def test_a_fault_of_ours_is_a_failed_result(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def work() -> None:
        service = await started(browser="offline")
        box = await service.open(BOTH, session_key="k")

        async def broken(*_: object) -> None:
            raise ZeroDivisionError("of ours")

        monkeypatch.setattr(service._backend, "search", broken)
        _, result = await drive(box.call, "browser.search", {"query": "x"})
        assert result.failed
        assert result.content == "Error: the tool failed (ZeroDivisionError)"
        await box.aclose()
        await service.aclose()

    run(work())
    assert "the tool browser.search failed" in caplog.text
