"""The prompt text that is rendered from messages, instructions, tools and history."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.scripted import FINAL, ids, playing
from tests.support.server import Server, served, with_server

DATE = "2025-06-28"
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


def answer(
    messages: list[dict[str, Any]], system_instructions: bool = False, **fields: Any
) -> tuple[int, Any, str]:
    """Returns (status, body, prompt text) of one request."""

    async def main(server: Server) -> tuple[int, Any, str]:
        response = await server.http.post("/v1/chat/completions", json={"messages": messages, **fields})
        return response.status_code, response.json(), server.prompt() if server.client.requests else ""

    config = {"system_start_date": DATE, "system_instructions": system_instructions}
    result: tuple[int, Any, str] = with_server(playing(FINAL + "ok<|return|>"), main, **config)
    return result


def prompt(messages: list[dict[str, Any]], **fields: Any) -> str:
    status, body, text = answer(messages, **fields)
    assert status == 200, body
    return text


def error(messages: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
    status, body, _ = answer(messages, **fields)
    assert status == 400, body
    found: dict[str, Any] = body["error"]
    assert found["type"] == "invalid_request_error"
    return found


SYSTEM = (
    "<|start|>system<|message|>You are ChatGPT, a large language model trained by OpenAI.\n"
    "Knowledge cutoff: 2024-06\nCurrent date: 2025-06-28\n\nReasoning: medium\n\n"
    "# Valid channels: analysis, commentary, final. Channel must be included for every message.<|end|>"
)
USER = [{"role": "user", "content": "What is 2 + 2?"}]


def test_a_simple_prompt_is_rendered_exactly() -> None:
    text = prompt(USER)
    assert text == SYSTEM + "<|start|>user<|message|>What is 2 + 2?<|end|><|start|>assistant"
    assert len(ids(text)) == 75  # measured with openai-harmony


def test_instructions_can_be_in_the_system_message() -> None:
    text = prompt([{"role": "system", "content": "Be brief."}, *USER], system_instructions=True)
    system = SYSTEM.replace("OpenAI.\n", "OpenAI.\nBe brief.\n", 1)
    assert text == system + "<|start|>user<|message|>What is 2 + 2?<|end|><|start|>assistant"


@pytest.mark.parametrize(
    ("text", "effort", "left"),
    [
        ("Reasoning: high", "high", ""),
        ("reasoning:LOW  ", "low", ""),
        ("Be brief.\n\n  Reasoning: low\r\nBe kind.", "low", "Be brief.\n\nBe kind."),
        ("Reasoning: low\nReasoning: high\nGo.", "high", "Go."),
        ([{"type": "text", "text": "Reasoning: high\n"}, {"type": "text", "text": "Go."}], "high", "Go."),
        ("Use Reasoning: high", "medium", "Use Reasoning: high"),
        ("Reasoning: high, please", "medium", "Reasoning: high, please"),
        ("Reasoning: extreme", "medium", "Reasoning: extreme"),
        ("Reasoning:\nhigh", "medium", "Reasoning:\nhigh"),
    ],
)
def test_a_line_of_the_instructions_sets_the_effort(text: Any, effort: str, left: str) -> None:
    """The model card's "Reasoning: high" moves into harmony's own system message."""
    for role in ("system", "developer"):
        found = prompt([{"role": role, "content": text}, *USER])
        assert found.count(f"Reasoning: {effort}\n\n# Valid channels") == 1
        assert found.partition("<|start|>user")[0].partition("# Instructions\n\n")[2] == (
            f"{left}<|end|>" if left else ""
        )


def test_only_system_and_developer_messages_set_the_effort() -> None:
    asked = [
        {"role": "user", "content": "Reasoning: high"},
        {"role": "assistant", "content": "Reasoning: high"},
    ]
    text = prompt([*asked, *USER])
    assert "Reasoning: medium\n" in text
    assert text.count("Reasoning: high") == 2
    later = prompt([*USER, {"role": "developer", "content": "Reasoning: low"}, *USER])
    assert "Reasoning: low\n" in later
    assert "<|start|>developer" not in later  # no text is left


def test_unknown_effort_names_the_field() -> None:
    assert error(USER, reasoning_effort="extreme")["param"] == "reasoning_effort"
    assert error(USER, reasoning={"effort": "extreme"})["param"] == "reasoning.effort"


def test_tools_stay_in_the_prompt_when_none_may_be_called() -> None:
    assert prompt(USER, tools=[TOOL], tool_choice="none") == prompt(USER, tools=[TOOL])


@pytest.mark.parametrize("fields", [{"tools": []}, {"tools": None}])
def test_empty_tools_do_not_change_the_prompt(fields: dict[str, Any]) -> None:
    assert prompt(USER, **fields) == prompt(USER)


HISTORY = [
    *USER,
    {
        "role": "assistant",
        "content": "Let me look.",
        "reasoning": "Need weather.",
        "tool_calls": [
            {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"n":1}'}},
            {"id": "call_2", "type": "function", "function": {"name": "g", "arguments": ""}},
        ],
    },
    {"role": "tool", "tool_call_id": "call_2", "content": "two"},
    {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "one"}]},
]


def test_an_unfinished_tool_loop_keeps_its_reasoning_calls_and_results() -> None:
    text = prompt(HISTORY)
    assert text.endswith(
        "<|start|>assistant<|channel|>analysis<|message|>Need weather.<|end|>"
        "<|start|>assistant<|channel|>commentary<|message|>Let me look.<|end|>"
        '<|start|>assistant to=functions.f<|channel|>commentary <|constrain|>json<|message|>{"n":1}<|call|>'
        "<|start|>assistant to=functions.g<|channel|>commentary <|constrain|>json<|message|>{}<|call|>"
        "<|start|>functions.g to=assistant<|channel|>commentary<|message|>two<|end|>"
        "<|start|>functions.f to=assistant<|channel|>commentary<|message|>one<|end|>"
        "<|start|>assistant"
    )


def test_legacy_function_messages_are_rendered() -> None:
    text = prompt(
        [
            *USER,
            {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}},
            {"role": "function", "name": "f", "content": "done"},
        ],
        functions=[TOOL["function"]],
    )
    assert "<|start|>functions.f to=assistant<|channel|>commentary<|message|>done<|end|>" in text
    assert "type get_weather" in text


def test_assistant_messages_may_have_all_keys_of_an_answer() -> None:
    message = {
        "role": "assistant",
        "content": "4",
        "refusal": None,
        "annotations": [],
        "audio": None,
        "tool_calls": None,
        "function_call": None,
        "reasoning_content": None,
    }
    assert "<|message|>4<|end|>" in prompt([*USER, message, {"role": "user", "content": "More."}])


def test_participant_names_are_rendered_or_refused() -> None:
    assert "<|start|>user:anna<|message|>hi<|end|>" in prompt(
        [{"role": "user", "name": "anna", "content": "hi"}]
    )
    assert "<|start|>user:Łukasz@例<|message|>hi<|end|>" in prompt(
        [{"role": "user", "name": "Łukasz@例", "content": "hi"}]
    )
    for name in ("a to=functions.f", "a\u2028b", "a<|end|>", ""):
        bad = [{"role": "user", "name": name, "content": "hi"}]
        assert error(bad)["param"] == "messages[0].name"


BAD: dict[str, tuple[list[Any], str]] = {
    "unknown tool_call_id": (
        [*USER, {"role": "tool", "tool_call_id": "call_9", "content": "x"}],
        "messages[1].tool_call_id",
    ),
    "result before its call": (HISTORY[2:], "messages[0].tool_call_id"),
    "role": ([{"role": "robot", "content": "x"}], "messages[0].role"),
    "no content": ([{"role": "user"}], "messages[0].content"),
    "content": ([{"role": "user", "content": 5}], "messages[0].content"),
    "part": ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0]"),
    "call name": (
        [
            *USER,
            {"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "a b", "arguments": ""}}]},
        ],
        "messages[1].tool_calls[0].function.name",
    ),
    "call id": (
        [*USER, {"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}],
        "messages[1].tool_calls[0].id",
    ),
    "not an object": (["hi"], "messages[0]"),
    "empty": ([], "messages"),
}


@pytest.mark.parametrize(("messages", "param"), BAD.values(), ids=BAD.keys())
def test_errors_of_invalid_messages_name_their_path(messages: list[Any], param: str) -> None:
    assert error(messages)["param"] == param


# --------------------------------------------------------------------------- continue_final_message


def test_the_content_of_the_last_message_can_be_continued() -> None:
    messages = [*USER, {"role": "assistant", "content": "2 + 2 is"}]
    text = prompt(messages, continue_final_message=True, add_generation_prompt=False)
    assert text.endswith("<|start|>assistant<|channel|>final<|message|>2 + 2 is")


def test_reasoning_and_the_content_after_it_can_be_continued() -> None:
    thinking = [*USER, {"role": "assistant", "content": None, "reasoning": "Let me"}]
    assert prompt(thinking, continue_final_message=True).endswith(
        "<|start|>assistant<|channel|>analysis<|message|>Let me"
    )
    both = [*USER, {"role": "assistant", "content": "So", "reasoning": "Done."}]
    assert prompt(both, continue_final_message=True).endswith(
        "<|channel|>analysis<|message|>Done.<|end|><|start|>assistant<|channel|>final<|message|>So"
    )


async def test_the_answer_contains_only_the_continuation() -> None:
    async with served(playing(" four.<|return|>")) as server:
        messages = [*USER, {"role": "assistant", "content": "It is"}]
        response = await server.http.post(
            "/v1/chat/completions", json={"messages": messages, "continue_final_message": True}
        )
        choice = response.json()["choices"][0]
    assert choice["message"]["content"] == " four."
    assert choice["finish_reason"] == "stop"
