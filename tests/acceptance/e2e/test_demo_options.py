"""``chorale serve demo`` with drafts takes fewer steps, and with tools it uses them."""

from __future__ import annotations

import re
import urllib.request
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from tests.deploy.promql import all_faults, queries
from tests.support import ROOT
from tests.support.served import Served, at_once, serving

CONFIG = '{"method": "ngram", "num_speculative_tokens": 4}'
COUNTER = "vllm:spec_decode_num"
TEXT = "red apple, green pear, blue plum, yellow melon, brown date, orange lemon, purple fig, pink peach"
REQUESTS: list[dict[str, Any]] = [
    {"content": f"Repeat: {TEXT}", "temperature": 0},
    {"content": f"Repeat: {TEXT}", "temperature": 1, "seed": 11},
    {"content": "What is 17 + 25?", "temperature": 1, "seed": 3, "n": 2},
]
CODE: Any = {"type": "code_interpreter", "container": {"type": "auto"}}
WEB: Any = {"type": "web_search"}
SUM = "What is 123456 * 7891?"
RESULT = "974191296"


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    options = ("--speculative-config", CONFIG, "--log-stats-interval", "0.5")
    tools = ("--tool-server", "demo", "--browser-tool", "offline")
    with serving("demo", tmp_path_factory.mktemp("options"), *options, *tools) as server:
        yield server


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


def test_drafts_are_accepted_and_counted(demo: Served) -> None:
    """This test must send the first requests. ``claims/test_drafts.py`` tests that answers do not change."""
    found = answers(demo)
    assert "red apple, green pear, blue plum" in found[0][0]
    drafted, accepted = (demo.metric(f"{COUNTER}_{name}_tokens_total") for name in ("draft", "accepted"))
    assert 15 < accepted <= drafted
    assert demo.metric(f"{COUNTER}_accepted_tokens_per_pos_total") == accepted
    tokens = sum(each for each in found if isinstance(each, int))
    assert demo.metric("vllm:generation_tokens_total") == tokens
    assert demo.metric(f"{COUNTER}_drafts_total") <= demo.metric("chorale:engine_steps_total")
    # The first token of each of the four choices has no inter-token latency.
    assert demo.metric("vllm:inter_token_latency_seconds_count") == tokens - 4


def test_banner_and_log_say_what_is_on(demo: Served) -> None:
    answers(demo, REQUESTS[:1])
    assert "drafts    ngram, up to 4 draft tokens" in demo.log.read_text()
    demo.wait_until("the line", lambda: "SpecDecoding metrics: Mean acc" in demo.log.read_text())
    log = demo.log.read_text()
    assert "browser (offline" in log
    assert "python (" in log or "python is not available" in log


def test_dashboard_alerts_and_autoscalers_ask_for_metrics_of_this_server(demo: Served) -> None:
    """This server also has the metrics of drafts. Names, types and labels must agree (``promql.py``)."""
    demo.client().completions.create(model="demo", prompt="a", max_tokens=2)
    with urllib.request.urlopen(f"{demo.url}/metrics", timeout=5) as answer:
        text = answer.read().decode()
    assert len(list(queries())) > 60
    assert all_faults(text) == []


def test_the_page_of_metrics_names_what_this_server_has(demo: Served) -> None:
    page = (ROOT / "docs" / "reference" / "metrics.md").read_text("utf-8")
    with urllib.request.urlopen(f"{demo.url}/metrics", timeout=5) as answer:
        types = re.findall(r"^# TYPE (chorale:\w+) (\w+)$", answer.read().decode(), re.MULTILINE)
    own = [(name, kind) for name, kind in types if not name.startswith("chorale:engine_process_")]
    assert len(own) > 15
    for name, kind in own:
        assert f"| `{name}` | {kind} |" in page


@pytest.mark.usefixtures("python_sandbox")
def test_the_demo_computes_with_python(demo: Served) -> None:
    """The tool's result is in the answer: streamed, in the background, and in Chat."""
    client = demo.client()
    include: Any = ["code_interpreter_call.outputs"]
    with client.responses.stream(
        model="demo", input=SUM, tools=[CODE], include=include, temperature=0
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

    job = client.responses.create(model="demo", input=SUM, tools=[CODE], background=True, temperature=0)
    demo.wait_until("the job", lambda: client.responses.retrieve(job.id).status == "completed")
    assert RESULT in client.responses.retrieve(job.id).output_text

    tools: Any = [CODE]
    chat = client.chat.completions.create(
        model="demo", messages=[{"role": "user", "content": SUM}], tools=tools, temperature=0
    )
    assert RESULT in (chat.choices[0].message.content or "")


def test_the_demo_searches(demo: Served) -> None:
    client = demo.client()
    made = client.responses.create(
        model="demo", input="Look up the hairs of sea otters.", tools=[WEB], temperature=0
    )
    search = next(item for item in made.output if item.type == "web_search_call")
    assert search.status == "completed"
    assert search.action.type == "search"
    assert "otter" in (search.action.query or "")
    assert made.status == "completed"
