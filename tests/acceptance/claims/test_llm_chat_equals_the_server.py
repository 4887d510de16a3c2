"""``LLM.chat`` and POST /v1/chat/completions give the same answers, on the demo model with equal seeds."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from chorale import LLM, SamplingParams
from chorale.harmony.vocab import CALL
from chorale.llm import RequestOutput
from tests.support.grammar.structured import make_client
from tests.support.server import Server, served

ENGINE: dict[str, Any] = {"device": "cpu", "num_threads": 1, "max_model_len": 2048, "max_num_seqs": 16}
SCHEMA = {"type": "object", "properties": {"sum": {"type": "integer"}}, "required": ["sum"]}
WEATHER = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


def tool(strict: bool = False) -> list[dict[str, Any]]:
    function = {"name": "get_weather", "description": "The weather.", "parameters": WEATHER, "strict": strict}
    return [{"type": "function", "function": function}]


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


SUM = [user("What is 12 + 30?")]
CALLED = [
    user("What is the weather in Paris?"),
    {
        "role": "assistant",
        "tool_calls": [
            {
                "id": "call_1",
                "type": "function",
                "function": {"name": "get_weather", "arguments": '{"city":"Paris"}'},
            }
        ],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": '{"temperature": 20}'},
]
# (messages, SamplingParams besides seed and temperature, arguments of chat).
CASES: dict[str, tuple[list[dict[str, Any]], dict[str, Any], dict[str, Any]]] = {
    "plain": (SUM, {}, {}),
    "effort": (SUM, {}, {"reasoning_effort": "high"}),
    "system": ([{"role": "system", "content": "Be brief.\nReasoning: low"}, user("hello")], {}, {}),
    "history": ([*SUM, {"role": "assistant", "content": "42"}, user("And plus 5?")], {}, {}),
    "hot": (SUM, {"temperature": 1.5, "top_k": 50, "presence_penalty": 0.5}, {}),
    "several": (SUM, {"n": 3, "temperature": 1.0}, {}),
    "cut": (SUM, {"max_tokens": 6}, {}),
    "stop": (SUM, {"stop": ["2"]}, {}),
    "stop token": (SUM, {"stop_token_ids": [2366, 17]}, {}),
    "no end": (SUM, {"ignore_eos": True, "max_tokens": 32}, {}),
    "long": (SUM, {"min_tokens": 24, "max_tokens": 32}, {}),
    "schema": (SUM, {"structured_outputs": {"json": SCHEMA}}, {}),
    "regex": (SUM, {"structured_outputs": {"regex": "[0-9]{3}"}}, {}),
    "choice": (SUM, {"structured_outputs": {"choice": ["red", "blue"]}}, {}),
    "tools": ([user("What is the weather in Paris?")], {}, {"tools": tool()}),
    "strict tools": ([user("What is the weather in Rome?")], {"temperature": 1.0}, {"tools": tool(True)}),
    "result": (CALLED, {}, {"tools": tool()}),
}


def sampling_of(case: str) -> dict[str, Any]:
    return {"seed": 7, "temperature": 0.3, "max_tokens": 32, **CASES[case][1]}


@pytest.fixture(scope="module")
def of_llm() -> dict[str, list[dict[str, Any]]]:
    """Returns the answers of ``LLM.chat``, called once for all cases with equal arguments."""
    found: dict[str, list[dict[str, Any]]] = {}
    with LLM("demo", **ENGINE) as llm:
        for more in {json.dumps(more): more for _, _, more in CASES.values()}.values():
            cases = [case for case in CASES if CASES[case][2] == more]
            sampling = [SamplingParams(**sampling_of(case)) for case in cases]
            outputs = llm.chat([CASES[case][0] for case in cases], sampling, use_tqdm=False, **more)
            found |= {case: said(output) for case, output in zip(cases, outputs, strict=True)}
    return found


@pytest.fixture(scope="module")
def of_server() -> dict[str, list[dict[str, Any]]]:
    """Returns the server's answers to the same requests, sent concurrently."""
    client = make_client("demo", **ENGINE)

    async def ask_all() -> dict[str, list[dict[str, Any]]]:
        try:
            async with served(client) as server:
                answers = await asyncio.gather(*(ask(server, case) for case in CASES))
        finally:
            await client.close()
        return dict(zip(CASES, answers, strict=True))

    return asyncio.run(ask_all())


def said(output: RequestOutput) -> list[dict[str, Any]]:
    return [
        {
            "prompt": output.prompt_token_ids,
            "token_ids": choice.token_ids,
            "content": choice.text or None,
            "reasoning": choice.reasoning,
            "calls": [(call.name, call.arguments) for call in choice.tool_calls],
            "finish": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }
        for choice in output.outputs
    ]


async def ask(server: Server, case: str) -> list[dict[str, Any]]:
    messages, _, more = CASES[case]
    body = {"messages": messages, "return_token_ids": True, **sampling_of(case), **more}
    response = await server.http.post("/v1/chat/completions", json=body, timeout=None)
    assert response.status_code == 200, response.text
    answer = response.json()
    return [
        {
            "prompt": answer["prompt_token_ids"],
            "token_ids": choice["token_ids"],
            "content": choice["message"]["content"],
            "reasoning": choice["message"]["reasoning"],
            "calls": [
                (call["function"]["name"], call["function"]["arguments"])
                for call in choice["message"].get("tool_calls", ())
            ],
            # LLM reports a call as vLLM does: finish reason "stop", stop token <|call|>.
            "finish": "stop" if choice["finish_reason"] == "tool_calls" else choice["finish_reason"],
            "stop_reason": CALL if choice["finish_reason"] == "tool_calls" else choice["stop_reason"],
        }
        for choice in answer["choices"]
    ]


@pytest.mark.parametrize("case", CASES)
def test_llm_chat_equals_the_server(
    of_llm: dict[str, list[dict[str, Any]]], of_server: dict[str, list[dict[str, Any]]], case: str
) -> None:
    ours = of_llm[case]
    assert ours == of_server[case]
    assert len(ours) == CASES[case][1].get("n", 1)
    if case in ("tools", "result"):
        assert any(choice["calls"] or choice["content"] for choice in ours)
