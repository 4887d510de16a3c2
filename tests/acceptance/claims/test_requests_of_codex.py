"""Requests in the form of Codex, with its shell and apply_patch tools, over a scripted engine.

``tests/acceptance/clients/test_codex.py`` runs Codex itself where it is installed.
"""

from __future__ import annotations

import json
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


async def test_a_patch_is_asked_for_and_its_result_read() -> None:
    results = {
        "function_call": {"type": "function_call_output", "output": "print('hello')\n"},
        "custom_tool_call": {"type": "custom_tool_call_output", "output": "Success."},
    }
    async with served(in_rounds(FIRST, SECOND, THIRD)) as server:
        content = [{"type": "input_text", "text": "Make it say goodbye."}]
        items: list[dict[str, Any]] = [{"type": "message", "role": "user", "content": content}]
        made = []
        for _ in range(3):
            events = frames(await send(server, "responses", request(items)))
            assert events[-1]["type"] == "response.completed", events[-1]
            made.append(events[-1]["response"]["output"][-1])
            items += events[-1]["response"]["output"]
            if made[-1]["type"] in results:
                items.append({**results[made[-1]["type"]], "call_id": made[-1]["call_id"]})
        shell, patch, answer = made
        assert (shell["name"], json.loads(shell["arguments"])) == ("shell", {"command": ["cat", "hello.py"]})
        assert (patch["name"], patch["input"]) == ("apply_patch", PATCH)
        assert answer["content"][0]["text"] == "It says goodbye now."
        prompt = server.prompt()
        assert "print('hello')\n<|end|>" in prompt
        assert f"<|message|>{PATCH}<|call|>" in prompt
        assert "type mcp__notes__list" in prompt
