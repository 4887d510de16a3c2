"""Custom tools on a real engine with a random checkpoint: the input of a call matches the tool's grammar."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import Any

from tests.support.faces import ask
from tests.support.grammar.schema_cases import BIAS
from tests.support.grammar.structured import answering
from tests.support.local_client import LocalClient

LARK = 'start: "*** Begin" LF line{1,2} "*** End"\nline: ("+" | "-") /[a-d]{1,4}/ LF\n%import common.LF\n'


def custom(**form: str) -> dict[str, Any]:
    return {"type": "custom", "name": "edit", "format": form}


def spells(pattern: str) -> Callable[[dict[str, Any]], object]:
    return lambda item: re.fullmatch(pattern, item["input"])


# (declared tool, check of its item).
TOOLS: list[tuple[dict[str, Any], Callable[[dict[str, Any]], object]]] = [
    (
        custom(type="grammar", syntax="regex", definition="[A-C]{2}-[0-9]{3}"),
        spells("[A-C]{2}-[0-9]{3}"),
    ),
    (
        custom(type="grammar", syntax="lark", definition=LARK),
        spells(r"\*\*\* Begin\n([+-][a-d]{1,4}\n){1,2}\*\*\* End"),
    ),
    (custom(type="text"), spells(r"(?s).*")),
    ({"type": "shell"}, lambda item: item["action"]["commands"]),
    ({"type": "local_shell"}, lambda item: item["action"]["command"]),
    ({"type": "apply_patch"}, lambda item: item["operation"]["type"] and "path" in item["operation"]),
]


async def test_a_demanded_call_has_its_form(client: LocalClient) -> None:
    async with answering(client) as server:

        async def one(tool: dict[str, Any], check: Callable[[Any], object], stream: bool) -> None:
            choice = {name: tool[name] for name in ("type", "name") if name in tool}
            fields = {"tools": [tool], "tool_choice": choice, "max_tokens": 400, "seed": 2 + 2 * stream}
            found = await ask(server, "responses", stream, temperature=1.0, logit_bias=BIAS, **fields)
            body = found.raw[-1]["response"] if stream else found.raw
            item = body["output"][-1]
            kind = {"custom": "custom_tool_call"}.get(tool["type"], f"{tool['type']}_call")
            assert (item["type"], body["status"]) == (kind, "completed"), body
            assert check(item), item

        await asyncio.gather(*(one(*tool, stream) for tool in TOOLS for stream in (False, True)))
