"""Built-in tools through every API, run by the server itself and by Chorale's MCP servers.

The model's output is scripted; the tools are real. ``structured/test_built_in_choices.py`` tests that a
demanded tool runs.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from chorale.config.engine import ToolConfig
from chorale.testing.scripted_client import Script, ScriptedClient
from tests.support.faces import ask
from tests.support.ports import free_port
from tests.support.server import VOCAB, Server, with_server

# (API, fields): Responses whole, in the background and streamed; Chat whole and streamed.
WAYS: list[tuple[str, dict[str, Any]]] = [
    ("responses", {}),
    ("responses", {"background": True}),
    ("responses", {"stream": True}),
    ("chat", {}),
    ("chat", {"stream": True}),
]
WEB = {"type": "web_search"}
CODE = {"type": "code_interpreter", "container": {"type": "auto"}}

TOOL_ROUNDS = (
    '<|channel|>analysis to=browser.search code<|message|>{"query":"sea otter hairs"}<|call|>',
    '<|channel|>analysis to=browser.open code<|message|>{"id":0}<|call|>',
    "<|channel|>analysis to=python code<|message|>print(6 * 7)<|call|>",
    "<|channel|>final<|message|>A million【1†L4-L5】and 42.<|return|>",
)
URL = "https://sample.chorale.invalid/sea-otters"
LINK = f" ([sample.chorale.invalid]({URL})) "


@contextlib.contextmanager
def mcp_server(folder: Path, name: str, *options: str) -> Iterator[str]:
    """Runs ``chorale tools serve NAME``, as other engines use it; yields its host:port once it is healthy."""
    port, log = free_port(), folder / f"{name}.log"
    command = [sys.executable, "-m", "chorale", "tools", "serve", name, "--port", str(port), *options]
    environment = {**os.environ, "PYTHONWARNINGS": "ignore"}
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environment)
    try:
        deadline = time.monotonic() + 30
        while True:
            assert process.poll() is None, log.read_text()
            with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/health"):
                break
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)
        yield f"127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(10)


def rounds() -> ScriptedClient:
    """Plays the same turn for each of ``WAYS``."""
    texts: Iterator[str] = iter(TOOL_ROUNDS * len(WAYS))
    return ScriptedClient(lambda request, index: Script(VOCAB.encode_with_special(next(texts))))


async def check_tools(server: Server, face: str, fields: dict[str, Any]) -> None:
    if face == "responses":
        fields = {**fields, "include": ["code_interpreter_call.outputs"]}
    found = await ask(server, face, history=("How many hairs, and 6 * 7?",), tools=[WEB, CODE], **fields)
    assert found.builtin == [
        ("web_search_call", "completed"),
        ("web_search_call", "completed"),
        ("code_interpreter_call", "completed"),
    ]
    assert found.outputs == ["42\n"]
    assert found.text == f"A million{LINK}and 42."
    assert found.cited == [(LINK, URL)]
    assert found.finish == "stop"


async def every_way(server: Server) -> None:
    for face, fields in WAYS:
        await check_tools(server, face, fields)


def run(tools: ToolConfig) -> None:
    with_server(rounds(), every_way, tools=tools, names=("demo",), system_start_date="2026-01-02")


@pytest.mark.usefixtures("python_sandbox")
def test_builtin_tools_run_in_the_server() -> None:
    run(ToolConfig(servers=("demo",), browser="offline"))


@pytest.mark.usefixtures("python_sandbox")
def test_builtin_tools_run_over_mcp(tmp_path: Path) -> None:
    with (
        mcp_server(tmp_path, "browser", "--browser-tool", "offline") as browser,
        mcp_server(tmp_path, "python") as python,
    ):
        run(ToolConfig(servers=(browser, python)))
