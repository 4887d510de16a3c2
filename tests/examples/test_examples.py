"""Each example runs against the demo model with its documented command and prints its documented output."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from chorale.machine.processes import die_with_parent
from tests.docs.python_child import Execute, python_child
from tests.examples.conftest import NAME
from tests.support.served import Served, free_port, serving

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def needs(*modules: str) -> None:
    for module in modules:
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed")


def run(server: Served, *command: str) -> str:
    """Run ``command`` with the server's address in the environment. Returns its standard output."""
    environment = {**os.environ, "CHORALE_URL": server.url, "OMP_NUM_THREADS": "1"}
    environment.pop("CHORALE_MODEL", None)
    done = subprocess.run(
        command, cwd=EXAMPLES.parent, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def interpreter(example_server: Served) -> Iterator[Execute]:
    """Runs the scripts one after the other: to import the SDKs takes longer than most of them."""
    with python_child(CHORALE_URL=example_server.url) as execute:
        yield execute


def python(interpreter: Execute, name: str, *arguments: str) -> str:
    path = EXAMPLES / name
    source = (
        f"import runpy, sys; sys.path.insert(0, {str(EXAMPLES)!r}); sys.argv = {[str(path), *arguments]!r}\n"
        f"runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    return interpreter(name, source, EXAMPLES.parent)


def test_offline_batch(interpreter: Execute) -> None:
    printed = python(interpreter, "offline_batch.py")
    assert "17 + 25 = 42" in printed
    assert "812 - 345 = 467" in printed


def test_streaming_chat(interpreter: Execute) -> None:
    printed = python(interpreter, "streaming_chat.py", "What is 17 + 25?")
    assert re.fullmatch(r"Reasoning: .+\n\nAnswer: 17 \+ 25 = 42\n\[\d+ tokens\]\n", printed, re.DOTALL)


def test_function_calls(interpreter: Execute) -> None:
    printed = python(interpreter, "function_calls.py").splitlines()
    assert printed[0].startswith('get_weather({"city":"Paris"}) = ')
    assert "18" in printed[-1]  # the temperature that the function returned


def test_streamed_function_calls(interpreter: Execute) -> None:
    printed = python(interpreter, "streamed_function_calls.py").splitlines()
    assert printed[0].startswith('get_weather({"city":"Paris"}) = ')
    assert "18" in printed[-1]


def test_conversation(interpreter: Execute) -> None:
    printed = python(interpreter, "conversation.py").splitlines()
    asked = {"What is 17 + 25?": "17 + 25 = 42", "What is 812 - 345?": "812 - 345 = 467"}
    assert printed[:2] == [f"{question} {answer}" for question, answer in asked.items()]
    stored = [line for pair in asked.items() for line in zip(("user", "assistant"), pair, strict=True)]
    assert printed[2:] == [f"{role}: {text}" for role, text in stored]


def test_file_input(interpreter: Execute) -> None:
    assert python(interpreter, "file_input.py") == "17 + 25 = 42\n"


def test_structured_output(interpreter: Execute) -> None:
    printed = python(interpreter, "structured_output.py")
    assert printed == "Person(name='Anna Berg', age=34, city='Oslo')\n"


def test_background(interpreter: Execute) -> None:
    printed = python(interpreter, "background.py")
    assert re.match(r"left resp_\w+ after event 3\n", printed)
    assert "23 × 17 = 391" in printed
    assert printed.endswith("status: completed\n")


def test_mcp_tools(interpreter: Execute) -> None:
    needs("mcp")
    port = free_port()
    command = [sys.executable, str(EXAMPLES / "mcp_tools.py"), "serve", str(port)]
    parent = os.getpid()
    with subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        preexec_fn=lambda: die_with_parent(parent),
    ) as server:
        try:
            deadline = time.monotonic() + 60
            printed = ""
            # Until the MCP server listens, listing its tools fails, and the answer reports the error.
            while "in_stock" not in printed and time.monotonic() < deadline:
                assert server.poll() is None
                printed = python(interpreter, "mcp_tools.py", "ask", f"http://127.0.0.1:{port}/mcp")
            assert "tools: ['in_stock']" in printed
        finally:
            server.kill()


def test_anthropic_messages(interpreter: Execute) -> None:
    needs("anthropic")
    printed = python(interpreter, "anthropic_messages.py")
    assert re.fullmatch(r"Thinking: .+\n\nAnswer: 17 \+ 25 = 42\n\[\d+ tokens\]\n", printed, re.DOTALL)


@pytest.mark.slow  # transformers takes ten seconds to import and load
def test_grpo(tmp_path: Path) -> None:
    """On a server of its own. The script fails if rollouts are not of the weights that it sent."""
    config = f'{{"backend": "checkpoint", "allowed_folders": ["{tmp_path}"]}}'
    options = ("--logprobs-mode", "processed_logprobs", "--weight-transfer-config", config)
    with serving("demo", tmp_path, *options) as server:
        sizes = ("--updates", "2", "--questions", "2", "--samples", "3")
        folders = ("--folder", str(tmp_path), "--chart", str(tmp_path / "chart.svg"))
        printed = run(server, sys.executable, str(EXAMPLES / "grpo.py"), *folders, *sizes)
        assert server.ask("/weight_info") == (200, {"weight_version": "2"})
    # Both compute in float32, in another order: 4.6e-5 was the worst of 725 tokens.
    assert float(printed.split()[-1]) < 1e-3
    assert (tmp_path / "chart.svg").read_text().count("<circle") == 2


def test_openai_agents(interpreter: Execute) -> None:
    needs("agents")
    assert "18" in python(interpreter, "agents/openai_agents.py")


def test_claude_code(example_server: Served, tmp_path: Path) -> None:
    """The script passes address and key to a stand-in for Claude Code, which calls the server."""
    needs("anthropic")
    program = tmp_path / "claude"
    program.write_text(
        f"#!{sys.executable}\nimport os, sys, anthropic\n"
        "said = anthropic.Anthropic().messages.create(model=os.environ['ANTHROPIC_MODEL'], max_tokens=400,\n"
        "    messages=[{'role': 'user', 'content': sys.argv[1]}])\n"
        "print(said.content[-1].text)\n"
    )
    program.chmod(0o755)
    script = EXAMPLES / "agents" / "claude_code.sh"
    printed = run(example_server, "env", f"CLAUDE={program}", "sh", str(script), "What is 17 + 25?")
    assert printed == "17 + 25 = 42\n"


def test_codex(example_server: Served, tmp_path: Path) -> None:
    text = (EXAMPLES / "agents" / "codex.toml").read_text()
    settings = tomllib.loads(text)
    provider = settings["model_providers"][settings["model_provider"]]
    assert provider["wire_api"] == "responses"
    codex = os.environ.get("CHORALE_CODEX") or shutil.which("codex")
    if codex is None:
        pytest.skip("codex is not installed; only its configuration file was checked")
    text = text.replace("http://localhost:8000", example_server.url).replace("openai/gpt-oss-120b", NAME)
    (tmp_path / "config.toml").write_text(text)
    command = [codex, "exec", "--skip-git-repo-check", "What is 17 + 25?"]
    assert "42" in run(example_server, "env", f"CODEX_HOME={tmp_path}", *command)


def test_every_example_is_run_and_listed() -> None:
    """A new file in examples/ needs a test here or in test_recipes.py, and a line in the README."""
    tested = "".join(each.read_text("utf-8") for each in Path(__file__).parent.glob("test_*.py"))
    listed = (EXAMPLES / "README.md").read_text("utf-8")
    for path in EXAMPLES.rglob("*"):
        if path.is_file() and path.name not in ("README.md", "common.py") and path.suffix != ".pyc":
            assert path.name in tested, path.name
            assert path.name in listed, path.name
            assert "chorale" in path.read_text("utf-8").lower()[:400], (
                f"{path.name} does not say how to run it"
            )
