"""Tools of the server through every face of the API, and every form of tool_choice.

A random model calls what the grammar makes it call. Where a model has to judge, its words are written down;
the tools are the real ones.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest

from chorale.config.engine import ToolConfig
from chorale.testing.scripted_client import Script, ScriptedClient
from tests.support.faces import ask
from tests.support.grammar.schema_cases import BIAS, obj
from tests.support.local_client import LocalClient
from tests.support.server import VOCAB, Server, with_server

# (face, fields): Responses at once, in the background and streamed; Chat both ways.
WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "responses": ("responses", {}),
    "responses_background": ("responses", {"background": True}),
    "responses_stream": ("responses", {"stream": True}),
    "chat": ("chat", {}),
    "chat_stream": ("chat", {"stream": True}),
}
SHORT = {"seed": 1, "max_tokens": 40, "logit_bias": {str(t): 8.0 for t in (200002, 200007)}}
FORCED = {"seed": 1, "max_tokens": 300, "logit_bias": BIAS}
SCHEMA = obj(city={"type": "string", "maxLength": 8}, n={"type": "integer", "minimum": 0, "maximum": 9})
GET = {"name": "get", "parameters": SCHEMA}
PING = {"name": "ping", "parameters": {"type": "object", "properties": {}}}
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


def run(client: Any, tools: ToolConfig, main: Callable[[Server], Awaitable[Any]]) -> None:
    with_server(client, main, tools=tools, names=("demo",), system_start_date="2026-01-02")


def rounds() -> ScriptedClient:
    texts: Iterator[str] = iter(TOOL_ROUNDS)
    return ScriptedClient(lambda request, index: Script(VOCAB.encode_with_special(next(texts))))


async def check_tools(server: Server, way: str) -> None:
    face, fields = WAYS[way]
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


@pytest.mark.usefixtures("python_sandbox")
@pytest.mark.parametrize("way", WAYS)
def test_builtin_tools_with_the_demo_tool_server(way: str) -> None:
    async def main(server: Server) -> None:
        await check_tools(server, way)

    run(rounds(), ToolConfig(servers=("demo",), browser="offline"), main)


@pytest.mark.parametrize("way", WAYS)
def test_builtin_tools_over_mcp(mcp_servers: tuple[str, ...], way: str) -> None:
    async def main(server: Server) -> None:
        await check_tools(server, way)

    run(rounds(), ToolConfig(servers=mcp_servers), main)


# --------------------------------------------------------------------------- tool_choice

CHOICES: dict[str, tuple[Any, set[str]]] = {  # what is asked for, what may be called
    "none": ("none", set()),
    "auto": ("auto", {"get", "ping", ""}),
    "required": ("required", {"get", "ping"}),
    "named": (("ping",), {"ping"}),
    "allowed_auto": ("auto", {"ping", ""}),
    "allowed_required": ("required", {"ping"}),
}


def allowing(face: str, mode: str, tool: dict[str, Any]) -> dict[str, Any]:
    allowed = {"mode": mode, "tools": [tool]}
    nested = {"allowed_tools": allowed} if face == "chat" else allowed
    return {"type": "allowed_tools", **nested}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("form", CHOICES)
def test_tool_choice(client: LocalClient, way: str, form: str) -> None:
    choice, allowed = CHOICES[form]
    face, fields = WAYS[way]

    async def main(server: Server) -> None:
        limits = FORCED if "" not in allowed and allowed else SHORT
        asked: dict[str, Any] = {**fields, **limits, "functions": [GET, PING]}
        if form.startswith("allowed"):
            ping = {"function": {"name": "ping"}} if face == "chat" else {"name": "ping"}
            asked["tool_choice"] = allowing(face, choice, {"type": "function", **ping})
        else:
            asked["choice"] = choice
        found = await ask(server, face, **asked)
        names = {name for name, _ in found.calls}
        if allowed and "" not in allowed:
            assert len(found.calls) == 1
        assert names <= allowed

    run(client, ToolConfig(), main)


DEMANDS = [(way, "code_interpreter") for way in WAYS] + [
    ("responses", "web_search"),
    ("chat_stream", "web_search"),
    ("chat", "allowed"),
]


@pytest.mark.usefixtures("python_sandbox")
@pytest.mark.parametrize(("way", "kind"), DEMANDS)
def test_a_demanded_tool_of_the_server_runs(client: LocalClient, way: str, kind: str) -> None:
    """On random weights: the demand is the grammar's doing. What the model makes of the tool is its own."""
    face, fields = WAYS[way]
    choice: Any = allowing(face, "required", WEB) if kind == "allowed" else {"type": kind}

    async def main(server: Server) -> None:
        found = await ask(
            server,
            face,
            tools=[WEB, CODE],
            tool_choice=choice,
            seed=2,
            max_tokens=80,
            thinking_token_budget=8,
            logit_bias=BIAS | {"200012": 12.0},
            **fields,
        )
        wanted = "code_interpreter_call" if kind == "code_interpreter" else "web_search_call"
        assert found.builtin[0][0] == wanted

    run(client, ToolConfig(servers=("demo",), browser="offline"), main)
