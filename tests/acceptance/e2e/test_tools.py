"""``chorale serve demo --tool-server demo``: the small model that ships inside uses the tools inside."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.served import Served, serving

CODE: Any = {"type": "code_interpreter", "container": {"type": "auto"}}
WEB: Any = {"type": "web_search"}
SUM = "What is 123456 * 7891?"
RESULT = "974191296"


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("tools")
    with serving("demo", folder, "--tool-server", "demo", "--browser-tool", "offline") as served:
        yield served


def test_the_banner_names_them(demo: Served) -> None:
    demo.wait_until("the banner", lambda: "ready in" in demo.log.read_text())
    log = demo.log.read_text()
    assert "browser (offline" in log
    assert "python (" in log or "python is not available" in log


@pytest.mark.usefixtures("python_sandbox")
def test_the_demo_computes_with_python(demo: Served) -> None:
    """Streamed, in the background, and in Chat: the tool's result is in the answer."""
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
