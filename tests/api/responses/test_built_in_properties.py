"""With tools, the stream folds to the body for random rounds and any split of their tokens.

Each prompt begins with the previous prompt, followed by the model's output and the tool's result.
"""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from chorale.harmony.vocab import CALL
from tests.api.chat.test_built_in_tools import CHAT, NESTED, USER
from tests.support.engine.scripted_client import Script
from tests.support.faces import joined, pieces
from tests.support.responses import TOOL, fold_events, without_ids
from tests.support.scripted import events_of, fold_chat
from tests.support.scripted_tools import ScriptedService, plain, tools_served
from tests.support.server import Server
from tests.support.sse import parse_sse
from tests.turns.tools.test_loop import CODE, MCP, WEB, failing, ids

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=10) | st.sampled_from(
    ['{"query":"q"}', "print(1)", "【0†L1】", "a【0†L1-L2】b【", "【9†L1】", "漢字 🧑‍🚀", "", "<|end|>"]
)
HEADERS = st.sampled_from(
    [
        "<|channel|>analysis<|message|>",
        "<|channel|>commentary<|message|>",
        "<|channel|>analysis to=browser.search code<|message|>",
        "<|channel|>analysis to=browser.serch code<|message|>",
        "<|channel|>commentary to=python<|channel|>commentary code<|message|>",
        " to=python<|channel|>analysis code<|message|>",
        "<|channel|>commentary to=srv.echo <|constrain|>json<|message|>",
        "<|channel|>commentary to=nobody.there <|constrain|>json<|message|>",
        "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>",
        "<|channel|>final<|message|>",
    ]
)
ENDS = st.sampled_from(["<|end|><|start|>assistant", "<|call|>", "<|call|>", "<|return|>", ""])
MESSAGES = st.lists(st.tuples(HEADERS, TEXTS, ENDS), min_size=1, max_size=3)
TOOLS = [WEB, CODE, MCP]


@st.composite
def turns(draw: st.DrawFn) -> list[list[int]]:
    """Draws the token ids of rounds. A round ends with its first stop id, where the engine stops."""
    rounds = []
    for messages in draw(st.lists(MESSAGES, min_size=1, max_size=4)):
        tokens = [token for head, text, end in messages for token in ids(head + text + end)]
        cut = next((i for i, token in enumerate(tokens) if token in (200002, 199999, CALL)), len(tokens) - 1)
        rounds.append(tokens[: cut + 1])
    return [*rounds, ids("<|channel|>final<|message|>done【0†L1】<|return|>")]


def scripts(rounds: list[list[int]], step: int) -> list[Script]:
    return [Script(tokens, tokens_per_step=step) for tokens in rounds]


@settings(deadline=None, max_examples=15, suppress_health_check=[HealthCheck.too_slow])
@given(turns(), st.sampled_from([1, 2, 5, 64]), st.booleans())
def test_streams_fold_to_bodies(rounds: list[list[int]], step: int, fails: bool) -> None:
    service: Any = failing("no") if fails else plain

    async def main() -> None:
        tools = [*TOOLS, TOOL]
        async with tools_served(*scripts(rounds, 64), tools=ScriptedService(service)) as server:
            body = await server.respond(input="x", tools=tools)
            prompts = [request.prompt_token_ids for request in server.client.requests]
        for before, after in itertools.pairwise(prompts):
            assert after[: len(before)] == before
        async with tools_served(*scripts(rounds, step), tools=ScriptedService(service)) as server:
            events = parse_sse(await server.stream(input="x", tools=tools))
            assert [r.prompt_token_ids for r in server.client.requests] == prompts
        folded = fold_events(events)
        assert without_ids(folded) == without_ids(body)
        assert folded["usage"] == body["usage"]
        for item in body["output"]:
            for part in item.get("content", ()):
                for note in part.get("annotations", ()):
                    assert part["text"][note["start_index"] : note["end_index"]].startswith(" ([example.com]")

    asyncio.run(asyncio.wait_for(main(), 30))


async def streamed(server: Server, **fields: Any) -> dict[str, Any]:
    """Returns the message that the stream's deltas add up to."""
    answer = await server.http.post(CHAT, json={"messages": USER, "stream": True, **fields})
    chunks = events_of(answer)
    calls = [
        {key: value for key, value in call.items() if key != "index"}
        for call in joined(pieces(chunks, "builtin_tool_calls"))
    ]
    annotations = pieces(chunks, "annotations")
    return {**fold_chat(chunks)[0], "annotations": annotations, "builtin_tool_calls": calls}


def without_id(call: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in call.items() if key != "id"}


@settings(deadline=None, max_examples=15, suppress_health_check=[HealthCheck.too_slow])
@given(turns(), st.sampled_from([1, 3, 64]))
def test_chat_streams_fold_to_bodies(rounds: list[list[int]], step: int) -> None:
    async def main() -> None:
        tools = [*TOOLS, NESTED]
        async with tools_served(*scripts(rounds, 64)) as server:
            body = await server.respond(path=CHAT, messages=USER, tools=tools)
            message = body["choices"][0]["message"]
        async with tools_served(*scripts(rounds, step)) as server:
            found = await streamed(server, tools=tools)
        assert (message["content"] or "") == (found.get("content") or "")
        assert (message["reasoning"] or "") == (found.get("reasoning") or "")
        assert message["annotations"] == found.get("annotations", [])
        calls, same = message.get("builtin_tool_calls", []), found.get("builtin_tool_calls", [])
        assert [without_id(call) for call in calls] == [without_id(call) for call in same]

    asyncio.run(asyncio.wait_for(main(), 30))
