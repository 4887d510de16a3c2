"""``chorale tools`` and the tool flags of ``serve``."""

from __future__ import annotations

import pytest

from chorale.cli.main import main
from chorale.config.engine import ToolConfig
from chorale.config.options.settings import merge


def tools(*arguments: str) -> ToolConfig:
    return merge(arguments, {}).server.tools


def test_flags_become_one_config() -> None:
    assert tools() == ToolConfig()
    assert tools("--tool-server", "demo").servers == ("demo",)
    assert tools("--tool-server", "a:1,b:2", "c:3").servers == ("a:1", "b:2", "c:3")
    assert tools("--python-tool", "bubblewrap", "--python-tool-memory", "512MiB").python_memory_bytes == 2**29
    assert tools("--no-mcp-requests").mcp_requests is False


@pytest.mark.parametrize(
    "arguments",
    [
        ("--python-tool", "jupyter"),
        ("--python-tool-timeout", "0"),
        ("--python-tool-memory", "1MiB"),
        ("--python-tool-processes", "0"),
        ("--browser-tool", "google"),
        ("--mcp-timeout", "1e9"),
        ("--browser-tool-bytes", "10"),
    ],
)
def test_invalid_values_are_refused(arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "show", *arguments]) == 2
    assert f"chorale: error: {arguments[0]}" in capsys.readouterr().err


def test_check_lists_available_and_missing_tools(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["tools", "check", "--browser-tool", "offline"]) == 0
    assert "OK    browser    offline, 7 pages" in capsys.readouterr().out
    monkeypatch.setenv("PATH", "/nonexistent")
    assert main(["tools", "check", "--python-tool", "bubblewrap"]) == 1
    assert "FIX   python     bubblewrap: bwrap is not installed" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments",
    [
        ["serve"],
        ["serve", "hammer"],
        ["dance"],
        ["check", "--model", "x"],
        ["serve", "browser", "--browser-tool", "exa"],
        ["serve", "browser", "--port", "99999"],
    ],
)
def test_invalid_commands_are_refused(
    arguments: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("EXA_API_KEY", raising=False)
    assert main(["tools", *arguments]) == 2
    assert "chorale: error" in capsys.readouterr().err


def test_a_taken_port_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert main(["tools", "serve", "browser", "--port", port]) == 2
    assert "cannot listen" in capsys.readouterr().err
