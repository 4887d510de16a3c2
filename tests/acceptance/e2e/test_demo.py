"""``chorale serve demo`` with drafts and tools: questions, agent loops, schemas, metrics.

Answers have to be right without options, too; neither drafts nor tools that are not used change them.
"""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import openai
import pytest

import chorale
from benchmarks.offline import Case, seconds_over_http, server
from chorale.api.operator.page import DEMO_EXAMPLES
from tests.deploy.promql import all_faults, queries
from tests.support.served import Served, at_once

MODEL = "demo"
FUNCTION = {
    "name": "get_weather",
    "description": "Get the current weather for a city",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "description": "City name"}},
        "required": ["city"],
    },
}
TOOL: Any = {"type": "function", "function": FUNCTION}


@pytest.fixture
def client(demo_served: Served) -> openai.OpenAI:
    return demo_served.client()


def user(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


SUMS: tuple[tuple[str, int, dict[str, Any]], ...] = (
    ("What is 17 + 25?", 42, {"temperature": 0}),
    ("What is 812 - 345?", 467, {}),
    ("What is 23 * 17?", 391, {"temperature": 1, "seed": 3}),
)


def test_sums_are_answered_with_reasoning_and_without_a_call(client: openai.OpenAI) -> None:
    def chat(question: str, sampling: dict[str, Any]) -> Any:
        asked = user(question)
        return client.chat.completions.create(model=MODEL, messages=asked, tools=[TOOL], **sampling)

    def respond(question: str) -> Any:
        return client.responses.create(model=MODEL, input=question, temperature=0)

    asked = [partial(chat, question, sampling) for question, _, sampling in SUMS]
    found = at_once(*asked, *(partial(respond, question) for question, _, _ in SUMS))
    for (_, answer, _), made, response in zip(SUMS, found[: len(SUMS)], found[len(SUMS) :], strict=True):
        choice = made.choices[0]
        assert choice.finish_reason == "stop"
        assert choice.message.tool_calls is None
        assert str(choice.message.content).endswith(f"= {answer}")
        assert str(answer) in choice.message.reasoning
        assert [item.type for item in response.output] == ["reasoning", "message"]
        assert response.output_text.endswith(f"= {answer}")
        assert response.status == "completed"


def test_effort_is_followed(client: openai.OpenAI) -> None:
    def ask(effort: Any) -> Any:
        return client.responses.create(
            model=MODEL, input="What is 17 + 25?", reasoning={"effort": effort}, temperature=0
        )

    lengths = []
    for response in at_once(*(partial(ask, effort) for effort in ("low", "medium", "high"))):
        assert response.output_text.endswith("= 42")
        assert response.usage is not None
        lengths.append(response.usage.output_tokens_details.reasoning_tokens)
    assert lengths[0] < lengths[1] < lengths[2]


def test_an_agent_loop_of_two_calls(client: openai.OpenAI) -> None:
    """The client calls tools until the model stops asking for them: one question, two cities."""
    messages = user("What is the weather in Paris and Rome?")
    cities = []
    for _ in range(4):
        done = client.chat.completions.create(model=MODEL, messages=messages, tools=[TOOL], temperature=0)
        message = done.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            break
        (call,) = message.tool_calls
        assert call.type == "function"
        cities.append(json.loads(call.function.arguments)["city"])
        degrees = json.dumps({"temperature": 10 + len(cities)})
        messages.append({"role": "tool", "tool_call_id": call.id, "content": degrees})
    assert cities == ["Paris", "Rome"]
    assert messages[-1]["content"].endswith("The temperature is 12.")


# Question -> what its answer contains. The page suggests the first ones.
QUESTIONS = {
    "What can you do?": "JSON",
    "What is 2 + 3 * 4?": "= 14",
    "Sort these numbers: 31, 4, 15": "4, 15, 31",
    "Reverse the word hello": "olleh",
    "Is this review positive or negative: The pizza was great!": "positive",
    "Give me a JSON object with name and age for Anna, 31": '{"name":"Anna","age":31}',
    "Wer bist du?": "Ich bin das kleine Demo-Modell",
    "Who are you?": "I am a small demo model",
    "What is the capital of France?": "I cannot answer that",
    "How do I run the real model?": "chorale serve openai/gpt-oss-20b",
    "Write a poem about trees.": "real model",
}


def test_the_page_suggests_questions_whose_answers_are_checked() -> None:
    assert tuple(QUESTIONS)[: len(DEMO_EXAMPLES)] == DEMO_EXAMPLES


@pytest.fixture(scope="module")
def answered(demo_served: Served) -> dict[str, list[str]]:
    """Asks each question three times, at the page's temperature, which is the checkpoint's default."""
    client = demo_served.client()

    def ask(question: str, seed: int) -> str:
        return client.responses.create(model=MODEL, input=question, extra_body={"seed": seed}).output_text

    asked = [question for question in QUESTIONS for _ in range(3)]
    found = at_once(*(partial(ask, question, place % 3) for place, question in enumerate(asked)))
    return {question: found[3 * place : 3 * place + 3] for place, question in enumerate(QUESTIONS)}


@pytest.mark.parametrize("question", QUESTIONS)
def test_questions_are_answered_rightly(answered: dict[str, list[str]], question: str) -> None:
    assert len(answered[question]) == 3
    for text in answered[question]:
        assert QUESTIONS[question] in text


def test_a_conversation_goes_on(client: openai.OpenAI) -> None:
    first = client.responses.create(model=MODEL, input="My name is Anna.", temperature=0)
    second = client.responses.create(
        model=MODEL, input="What is my name?", previous_response_id=first.id, temperature=0
    )
    assert second.output_text == "Your name is Anna."


def test_the_speed_script_counts_a_servers_tokens(demo_served: Served) -> None:
    assert server(demo_served.url) == ("demo", chorale.__version__)
    seconds = seconds_over_http(demo_served.url, "demo", Case(rows=3, prompt=20, output=4))
    assert seconds(4) > 0  # raises if an answer has another number of tokens


# --------------------------------------------------------------------------- drafts, metrics and tools

COUNTER = "vllm:spec_decode_num"
TEXT = "red apple, green pear, blue plum, yellow melon, brown date, orange lemon, purple fig, pink peach"
REQUESTS: list[dict[str, Any]] = [
    {"content": f"Repeat: {TEXT}", "temperature": 0},
    {"content": f"Repeat: {TEXT}", "temperature": 1, "seed": 11},
    {"content": "What is 17 + 25?", "temperature": 1, "seed": 3, "n": 2},
]
CODE: Any = {"type": "code_interpreter", "container": {"type": "auto"}}
WEB: Any = {"type": "web_search"}
PRODUCT = "What is 123456 * 7891?"
RESULT = "974191296"


def answers(server: Served, requests: list[dict[str, Any]] = REQUESTS) -> list[Any]:
    client = server.client()

    def ask(request: dict[str, Any]) -> Any:
        fields = {name: value for name, value in request.items() if name != "content"}
        messages: Any = [{"role": "user", "content": request["content"]}]
        return client.chat.completions.create(model="demo", messages=messages, max_tokens=200, **fields)

    found: list[Any] = []
    for answer in at_once(*(partial(ask, request) for request in requests)):
        found += [(choice.message.content, choice.finish_reason) for choice in answer.choices]
        assert answer.usage is not None
        found.append(answer.usage.completion_tokens)
    return found


def test_drafts_are_accepted_and_counted(demo_served: Served) -> None:
    """``runtime/test_draft_properties.py`` tests that answers do not change."""
    names = [f"{COUNTER}_draft_tokens", f"{COUNTER}_accepted_tokens", f"{COUNTER}_accepted_tokens_per_pos"]
    names += [f"{COUNTER}_drafts", "chorale:engine_steps", "vllm:generation_tokens"]
    names = [f"{name}_total" for name in names] + ["vllm:inter_token_latency_seconds_count"]
    before = [demo_served.metric(name) for name in names]
    found = answers(demo_served)
    counts = [demo_served.metric(name) - count for name, count in zip(names, before, strict=True)]
    drafted, accepted, by_position, drafts, steps, generated, latencies = counts
    assert "red apple, green pear, blue plum" in found[0][0]
    assert 15 < accepted <= drafted
    assert by_position == accepted
    tokens = sum(each for each in found if isinstance(each, int))
    assert generated == tokens
    assert drafts <= steps
    # The first token of each of the four choices has no inter-token latency.
    assert latencies == tokens - 4


def test_the_drafts_of_one_answer_add_up_to_those_of_the_engine(demo_served: Served) -> None:
    names = [f"{COUNTER}_{name}_total" for name in ("drafts", "draft_tokens", "accepted_tokens")]
    before = [demo_served.metric(name) for name in names]
    asked = {"prompt": "one two one two one two", "temperature": 0, "max_tokens": 60}
    _, answer = demo_served.ask("/v1/completions", asked)
    drafts, drafted, accepted = (demo_served.metric(n) - c for n, c in zip(names, before, strict=True))
    [choice], found = answer["choices"], answer["metrics"]["speculative_decoding"]
    assert choice["prompt_logprobs"] is choice["token_ids"] is None
    assert found["num_spec_steps"] == drafts > 0
    assert sum(found["per_step_drafted"]) == found["num_draft_tokens"] == drafted
    assert sum(found["per_step_accepted"]) == accepted
    _, several = demo_served.ask("/v1/completions", {"prompt": "one two", "n": 2, "max_tokens": 5})
    assert "metrics" not in several


def test_banner_and_log_say_what_is_on(demo_served: Served) -> None:
    answers(demo_served, REQUESTS[:1])
    assert "drafts    ngram, up to 4 draft tokens" in demo_served.log.read_text()
    demo_served.wait_until(
        "the line", lambda: "SpecDecoding metrics: Mean acc" in demo_served.log.read_text()
    )
    log = demo_served.log.read_text()
    assert "browser (offline" in log
    assert "python (" in log or "python is not available" in log


def test_dashboard_alerts_and_autoscalers_ask_for_metrics_of_this_server(demo_served: Served) -> None:
    """This server also has the metrics of drafts. Names, types and labels must agree (``promql.py``)."""
    demo_served.client().completions.create(model="demo", prompt="a", max_tokens=2)
    assert len(list(queries())) > 60
    assert all_faults(demo_served.metrics()) == []


@pytest.mark.usefixtures("python_sandbox")
def test_the_demo_computes_with_python(demo_served: Served) -> None:
    """The tool's result is in the answer: streamed, in the background, and in Chat."""
    client = demo_served.client()
    include: Any = ["code_interpreter_call.outputs"]
    with client.responses.stream(
        model="demo", input=PRODUCT, tools=[CODE], include=include, temperature=0
    ) as stream:
        types = [event.type for event in stream]
        final = stream.get_final_response()
    assert "response.code_interpreter_call.interpreting" in types
    call = next(item for item in final.output if item.type == "code_interpreter_call")
    assert call.outputs is not None
    assert call.outputs[0].type == "logs"
    assert call.outputs[0].logs.strip() == RESULT
    assert RESULT in final.output_text
    usage = final.usage
    assert usage is not None
    assert usage.input_tokens_details.cached_tokens > 0

    job = client.responses.create(model="demo", input=PRODUCT, tools=[CODE], background=True, temperature=0)
    demo_served.wait_until("the job", lambda: client.responses.retrieve(job.id).status == "completed")
    assert RESULT in client.responses.retrieve(job.id).output_text

    tools: Any = [CODE]
    chat = client.chat.completions.create(
        model="demo", messages=[{"role": "user", "content": PRODUCT}], tools=tools, temperature=0
    )
    assert RESULT in (chat.choices[0].message.content or "")


def test_the_demo_searches(demo_served: Served) -> None:
    client = demo_served.client()
    made = client.responses.create(
        model="demo", input="Look up the hairs of sea otters.", tools=[WEB], temperature=0
    )
    search = next(item for item in made.output if item.type == "web_search_call")
    assert search.status == "completed"
    assert search.action.type == "search"
    assert "otter" in (search.action.query or "")
    assert made.status == "completed"
