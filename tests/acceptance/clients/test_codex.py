"""Codex CLI, unmodified, edits a file in a temporary folder through its own tools.

Needs the program ``codex`` (``npm install @openai/codex``), in ``CHORALE_CODEX`` or on the PATH. The
scripted engine stands in for the model's judgement; requests, streams, tools and the edit itself are real.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.scripted import ANALYSIS, FINAL, NEXT, call, in_rounds
from tests.support.server import Server, in_thread

CODEX = os.environ.get("CHORALE_CODEX") or shutil.which("codex")
pytestmark = pytest.mark.skipif(CODEX is None, reason="codex is not installed")
END, CALL = "<|return|>", "<|call|>"
PATCH = "*** Begin Patch\n*** Update File: hello.py\n@@\n-print('hello')\n+print('goodbye')\n*** End Patch"


def codex(server: Server, folder: Path, model: str = "demo") -> subprocess.CompletedProcess[str]:
    home, work = folder / "home", folder / "work"
    home.mkdir()
    work.mkdir()
    (work / "hello.py").write_text("print('hello')\n")
    provider = (
        f'[model_providers.chorale]\nname = "Chorale"\nbase_url = "{server.url}"\nwire_api = "responses"\n'
    )
    (home / "config.toml").write_text(f'model = "{model}"\nmodel_provider = "chorale"\n{provider}')
    options = ["--skip-git-repo-check", "--sandbox", "danger-full-access", "--json"]
    return subprocess.run(
        [str(CODEX), "exec", *options, "Say goodbye instead of hello in hello.py"],
        cwd=work, env={**os.environ, "CODEX_HOME": str(home)}, stdin=subprocess.DEVNULL,
        capture_output=True, text=True, timeout=90, check=False,
    )  # fmt: skip


def test_codex_edits_a_file_through_its_shell(tmp_path: Path) -> None:
    script = in_rounds(
        ANALYSIS + "I look first." + NEXT + call("exec_command", json.dumps({"cmd": "cat hello.py"})) + CALL,
        call("exec_command", json.dumps({"cmd": f"apply_patch <<'EOF'\n{PATCH}\nEOF"})) + CALL,
        FINAL + "It says goodbye now." + END,
    )
    with in_thread(script) as server:
        done = codex(server, tmp_path)
        assert done.returncode == 0, done.stderr[-2000:]
        assert (tmp_path / "work" / "hello.py").read_text() == "print('goodbye')\n"
        assert "It says goodbye now." in done.stdout
        prompts = server.prompts()
        assert "print('hello')" in prompts[1]  # output of cat
        assert "I look first." in prompts[1]  # reasoning between calls is replayed
        assert len(prompts) == 3


def test_codex_edits_a_file_through_its_custom_tool(tmp_path: Path) -> None:
    """Models that Codex knows get the custom tool ``exec``: its input is a program that calls other tools."""
    program = f"text(await tools.apply_patch({json.dumps(PATCH)}))"
    script = in_rounds(
        f"<|channel|>commentary to=functions.exec <|message|>{program}" + CALL, FINAL + "Done." + END
    )
    known = "gpt-5.6-sol"
    with in_thread(script, names=("demo", known)) as server:
        done = codex(server, tmp_path, known)
        assert done.returncode == 0, done.stderr[-2000:]
        assert (tmp_path / "work" / "hello.py").read_text() == "print('goodbye')\n", done.stdout[-2000:]
        assert program in server.prompts()[1]
