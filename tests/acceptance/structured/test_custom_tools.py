"""Custom tools on a real engine over a random checkpoint: what a grammar demands is what is called."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from tests.support.grammar.schema_cases import BIAS
from tests.support.grammar.structured import run
from tests.support.local_client import LocalClient

LARK = 'start: "*** Begin" LF line{1,2} "*** End"\nline: ("+" | "-") /[a-d]{1,4}/ LF\n%import common.LF\n'
FORMATS: dict[str, tuple[dict[str, Any], str]] = {
    "regex": ({"type": "grammar", "syntax": "regex", "definition": "[A-C]{2}-[0-9]{3}"}, "[A-C]{2}-[0-9]{3}"),
    "lark": (
        {"type": "grammar", "syntax": "lark", "definition": LARK},
        r"\*\*\* Begin\n([+-][a-d]{1,4}\n){1,2}\*\*\* End",
    ),
    "text": ({"type": "text"}, r"(?s).*"),
}
SAMPLING = {"temperature": 1.0, "logit_bias": BIAS}


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("stream", [False, True])
def test_a_demanded_call_has_its_form(client: LocalClient, kind: str, stream: bool) -> None:
    form, pattern = FORMATS[kind]

    async def main(server: Any) -> None:
        tool = {"type": "custom", "name": "edit", "format": form}
        body = {"input": "x", "tools": [tool], "tool_choice": {"type": "custom", "name": "edit"}}
        body |= {"max_output_tokens": 300, "seed": 4, "stream": stream, **SAMPLING}
        response = await server.http.post("/v1/responses", json=body)
        assert response.status_code == 200, response.text
        if stream:
            final = json.loads(response.text.rstrip("\n").rpartition("data: ")[2])["response"]
        else:
            final = response.json()
        call = final["output"][-1]
        assert (call["type"], final["status"]) == ("custom_tool_call", "completed")
        assert re.fullmatch(pattern, call["input"])

    run(client, main)


@pytest.mark.parametrize(
    ("tool", "check"),
    [
        ({"type": "shell"}, lambda item: item["action"]["commands"]),
        ({"type": "local_shell"}, lambda item: item["action"]["command"]),
        ({"type": "apply_patch"}, lambda item: item["operation"]["type"] and "path" in item["operation"]),
    ],
    ids=["shell", "local_shell", "apply_patch"],
)
def test_tools_of_a_fixed_form_are_always_whole(client: LocalClient, tool: Any, check: Any) -> None:
    async def main(server: Any) -> None:
        body = {
            "input": "x",
            "tools": [tool],
            "tool_choice": {"type": tool["type"]},
            "max_output_tokens": 400,
        }
        response = await server.http.post("/v1/responses", json={**body, "seed": 2, **SAMPLING})
        final = response.json()
        call = final["output"][-1]
        assert (call["type"], final["status"]) == (f"{tool['type']}_call", "completed"), final
        assert check(call)

    run(client, main)
