"""The support matrix: every face with every feature, one test a cell; and every form of tool_choice.

Text, structured output and functions run on a real engine (random weights, so what comes out is the
grammar's doing). With tools the model's judgement is written down; the tools are the real ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from chorale.config import ToolConfig
from chorale.testing.scripted_client import Script, ScriptedClient
from tests.support.local_client import LocalClient
from tests.support.matrix import FACES, ask, run
from tests.support.schema_cases import BIAS, obj
from tests.support.server import VOCAB, Server

SHORT = {"seed": 1, "max_tokens": 40, "logit_bias": {str(t): 8.0 for t in (200002, 200007)}}
SCHEMA = obj(city={"type": "string", "maxLength": 8}, n={"type": "integer", "minimum": 0, "maximum": 9})
GET = {"type": "function", "name": "get", "parameters": SCHEMA}
PING = {"type": "function", "name": "ping", "parameters": {"type": "object", "properties": {}}}
FORCED = {"seed": 1, "max_tokens": 300, "logit_bias": BIAS}
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


def rounds() -> ScriptedClient:
    texts: Iterator[str] = iter(TOOL_ROUNDS)
    return ScriptedClient(lambda request, index: Script(VOCAB.encode_with_special(next(texts))))


async def check_tools(server: Server, face: str) -> None:
    found = await ask(server, face, "How many hairs, and 6 * 7?", tools=[WEB, CODE])
    assert found.builtin == [
        ("web_search_call", "completed"),
        ("web_search_call", "completed"),
        ("code_interpreter_call", "completed"),
    ]
    assert found.outputs == ["42\n"]
    assert found.text == f"A million{LINK}and 42."
    assert found.cited == [(LINK, URL)]
    assert found.finish == "stop"


@pytest.mark.usefixtures("python_sandbox")
@pytest.mark.parametrize("face", FACES)
def test_builtin_tools_with_the_demo_tool_server(face: str) -> None:
    async def main(server: Server) -> None:
        await check_tools(server, face)

    run(rounds(), ToolConfig(servers=("demo",), browser="offline"), main)


@pytest.mark.parametrize("face", FACES)
def test_builtin_tools_over_mcp(mcp_servers: tuple[str, ...], face: str) -> None:
    async def main(server: Server) -> None:
        await check_tools(server, face)

    run(rounds(), ToolConfig(servers=mcp_servers), main)


# --------------------------------------------------------------------------- tool_choice

CHOICES: dict[str, tuple[Any, set[str]]] = {  # what is asked for, what may be called
    "none": ("none", set()),
    "auto": ("auto", {"get", "ping", ""}),
    "required": ("required", {"get", "ping"}),
    "named": ({"type": "function", "name": "ping"}, {"ping"}),
    "allowed_auto": ({"type": "allowed_tools", "mode": "auto", "tools": [PING]}, {"ping", ""}),
    "allowed_required": ({"type": "allowed_tools", "mode": "required", "tools": [PING]}, {"ping"}),
}


@pytest.mark.parametrize("face", FACES)
@pytest.mark.parametrize("form", CHOICES)
def test_tool_choice(client: LocalClient, face: str, form: str) -> None:
    choice, allowed = CHOICES[form]
    if isinstance(choice, dict) and "tools" in choice:
        choice = {**choice, "tools": [{"type": "function", "name": "ping"}]}

    async def main(server: Server) -> None:
        limits = FORCED if "" not in allowed and allowed else SHORT
        found = await ask(server, face, tools=[GET, PING], tool_choice=choice, **limits)
        names = {name for name, _ in found.functions}
        if allowed and "" not in allowed:
            assert len(found.functions) == 1
        assert names <= allowed

    run(client, ToolConfig(), main)


DEMANDS = [(face, "code_interpreter") for face in FACES] + [
    ("responses", "web_search"),
    ("chat_stream", "web_search"),
    ("chat", "allowed"),
]


@pytest.mark.usefixtures("python_sandbox")
@pytest.mark.parametrize(("face", "kind"), DEMANDS)
def test_a_demanded_tool_of_the_server_runs(client: LocalClient, face: str, kind: str) -> None:
    """On random weights: the demand is the grammar's doing. What the model makes of the tool is its own."""
    choice: Any = {"type": kind}
    if kind == "allowed":
        choice = {"type": "allowed_tools", "mode": "required", "tools": [WEB]}

    async def main(server: Server) -> None:
        found = await ask(
            server,
            face,
            tools=[WEB, CODE, GET],
            tool_choice=choice,
            seed=2,
            max_tokens=80,
            thinking_token_budget=8,
            logit_bias=BIAS | {"200012": 12.0},
        )
        wanted = "code_interpreter_call" if kind == "code_interpreter" else "web_search_call"
        assert found.builtin[0][0] == wanted

    run(client, ToolConfig(servers=("demo",), browser="offline"), main)
