"""Requests in the form of Codex succeed, and a file is edited through its shell and apply_patch tools.

A scripted engine stands in for the model's judgement; requests, streams and the tools themselves are real.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

from tests.support.faces import send
from tests.support.scripted import ANALYSIS, FINAL, NEXT, call, in_rounds
from tests.support.server import served
from tests.support.sse import frames

GRAMMAR = """start: begin_patch hunk+ end_patch
begin_patch: "*** Begin Patch" LF
end_patch: "*** End Patch" LF?

hunk: add_hunk | delete_hunk | update_hunk
add_hunk: "*** Add File: " filename LF add_line+
delete_hunk: "*** Delete File: " filename LF
update_hunk: "*** Update File: " filename LF change_move? change?

filename: /(.+)/
add_line: "+" /(.*)/ LF -> line

change_move: "*** Move to: " filename LF
change: (change_context | change_line)+ eof_line?
change_context: ("@@" | "@@ " /(.+)/) LF
change_line: ("+" | "-" | " ") /(.*)/ LF
eof_line: "*** End of File" LF

%import common.LF
"""
PATCH = "*** Begin Patch\n*** Update File: hello.py\n@@\n-print('hello')\n+print('goodbye')\n*** End Patch"
SHELL: dict[str, Any] = {
    "type": "function",
    "name": "shell",
    "description": "Runs a shell command and returns its output.",
    "strict": False,
    "parameters": {
        "type": "object",
        "properties": {
            "command": {"type": "array", "items": {"type": "string"}},
            "workdir": {"type": "string"},
            "timeout_ms": {"type": "number"},
        },
        "required": ["command"],
        "additionalProperties": False,
    },
}
TOOLS: list[dict[str, Any]] = [
    SHELL,
    {
        "type": "custom",
        "name": "apply_patch",
        "description": "Use the `apply_patch` tool to edit files.",
        "format": {"type": "grammar", "syntax": "lark", "definition": GRAMMAR},
    },
    {"type": "web_search", "external_web_access": False},
    {
        "type": "namespace",
        "name": "mcp__notes",
        "description": "Notes of the user.",
        "tools": [{"type": "function", "name": "list", "parameters": {"type": "object", "properties": {}}}],
    },
    {"type": "image_generation", "output_format": "png"},
]
FIRST = (
    ANALYSIS + "Look first." + NEXT + call("shell", json.dumps({"command": ["cat", "hello.py"]})) + "<|call|>"
)
SECOND = (
    ANALYSIS
    + "Now edit."
    + NEXT
    + f"<|channel|>commentary to=functions.apply_patch<|message|>{PATCH}<|call|>"
)
THIRD = FINAL + "It says goodbye now.<|return|>"


def request(items: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns a request as recorded: stateless, streamed, with encrypted reasoning included."""
    return {
        "model": "demo",
        "instructions": "You are Codex, a coding agent.",
        "input": items,
        "tools": TOOLS,
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "store": False,
        "stream": True,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "0199-canary",
        "text": {"verbosity": "medium"},
        "client_metadata": {"x-codex-installation-id": "0"},
    }


def run_tool(item: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Runs a call as the client does."""
    if item["type"] == "function_call":
        command = json.loads(item["arguments"])["command"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=10, check=True)
        return {"type": "function_call_output", "call_id": item["call_id"], "output": done.stdout}
    assert (item["type"], item["name"]) == ("custom_tool_call", "apply_patch")
    apply_patch(item["input"], folder)
    return {"type": "custom_tool_call_output", "call_id": item["call_id"], "output": "Success."}


def apply_patch(patch: str, folder: Path) -> None:
    lines = patch.splitlines()
    assert (lines[0], lines[-1]) == ("*** Begin Patch", "*** End Patch")
    file = folder / lines[1].removeprefix("*** Update File: ")
    before = [line[1:] for line in lines[3:-1] if line[0] in " -"]
    after = [line[1:] for line in lines[3:-1] if line[0] in " +"]
    text = file.read_text()
    assert "\n".join(before) in text
    file.write_text(text.replace("\n".join(before), "\n".join(after)))


async def test_codex_edits_a_file(tmp_path: Path) -> None:
    (tmp_path / "hello.py").write_text("print('hello')\n")

    async with served(in_rounds(FIRST, SECOND, THIRD)) as server:
        content = [{"type": "input_text", "text": "Make it say goodbye."}]
        items: list[dict[str, Any]] = [{"type": "message", "role": "user", "content": content}]
        for _ in range(4):
            events = frames(await send(server, "responses", request(items)))
            assert events[-1]["type"] == "response.completed", events[-1]
            output = events[-1]["response"]["output"]
            items += output
            calls = [item for item in output if item["type"].endswith("_call")]
            if not calls:
                break
            items += [run_tool(item, tmp_path) for item in calls]
        assert items[-1]["content"][0]["text"] == "It says goodbye now."
        prompt = server.prompt()
        assert "print('hello')\n<|end|>" in prompt
        assert f"<|message|>{PATCH}<|call|>" in prompt
        assert "type mcp__notes__list" in prompt
    assert (tmp_path / "hello.py").read_text() == "print('goodbye')\n"
