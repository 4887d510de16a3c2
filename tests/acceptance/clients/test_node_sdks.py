"""The Vercel AI SDK and the TypeScript SDKs of OpenAI and Anthropic, unmodified.

Their packages are in the folder ``CHORALE_NODE_CLIENTS`` (``install.sh FOLDER nodes``). The model is
scripted. The AI SDK has its own strict schemas for answers, so it also gets every answer that the wire tests
record.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from tests.support.scripted import ANALYSIS, FINAL, NEXT, call, in_rounds
from tests.support.server import in_thread

HERE = Path(__file__).parent
FOLDER = os.environ.get("CHORALE_NODE_CLIENTS")
NODE = shutil.which("node")
pytestmark = pytest.mark.skipif(
    FOLDER is None or NODE is None, reason="CHORALE_NODE_CLIENTS is not set, or there is no node"
)
END, CALL = "<|return|>", "<|call|>"
PROVIDERS = ("responses", "chat", "compatible", "anthropic", "open-responses")
SHOWS_THOUGHTS = (
    "responses",
    "compatible",
    "anthropic",
    "open-responses",
)  # @ai-sdk/openai has no reasoning in chat
ANSWER = ANALYSIS + "I add." + NEXT + FINAL + "Forty-two." + END
PERSON = FINAL + '{"name":"Ada","age":36}' + END


def node(script: str, *arguments: str) -> Any:
    done = subprocess.run(
        [str(NODE), str(HERE / script), str(FOLDER), *arguments],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@pytest.mark.parametrize("task", ["text", "stream"])
@pytest.mark.parametrize("provider", PROVIDERS)
def test_text_and_thoughts(provider: str, task: str) -> None:
    with in_thread(in_rounds(ANSWER)) as server:
        found = node("ai_sdk.mjs", provider, task, server.url)
    assert (found["text"], found["finishReason"]) == ("Forty-two.", "stop")
    assert found.get("errors", []) == []
    assert found["usage"]["outputTokens"] > 0
    if provider in SHOWS_THOUGHTS and (provider, task) != ("open-responses", "text"):
        assert found["reasoning"] == "I add."


@pytest.mark.parametrize("task", ["tools", "toolstream"])
@pytest.mark.parametrize("provider", PROVIDERS)
def test_a_tool_runs_and_the_answer_follows(provider: str, task: str) -> None:
    script = in_rounds(
        ANALYSIS + "I ask." + NEXT + call("weather", '{"city":"Paris"}') + CALL,
        FINAL + "Take an umbrella." + END,
    )
    with in_thread(script) as server:
        found = node("ai_sdk.mjs", provider, task, server.url)
        assert found["calls"] == [{"city": "Paris"}]
        assert found["text"].endswith("Take an umbrella.")
        assert "It rains in Paris." in server.prompts()[1]


@pytest.mark.parametrize("provider", PROVIDERS)
def test_objects(provider: str) -> None:
    with in_thread(in_rounds(PERSON)) as server:
        assert node("ai_sdk.mjs", provider, "object", server.url) == {"object": {"name": "Ada", "age": 36}}


# Recorded answers that the AI SDK cannot read from any server: texts in the request or in the answer.
UNREADABLE = {
    "responses": (
        '"compaction"',
        "context_management",
        "compaction_trigger",
    ),  # this release does not know the item
    "chat": ('"type":"custom"',),  # it knows only function calls
    "compatible": ('"type":"custom"',),
    "completion": ('"echo":true',),  # the first token's log-probability is null
    "anthropic": (),
    "open-responses": (),
}
PATHS = {
    "responses": "/v1/responses",
    "open-responses": "/v1/responses",
    "chat": "/v1/chat/completions",
    "compatible": "/v1/chat/completions",
    "completion": "/v1/completions",
    "anthropic": "/v1/messages",
}


@pytest.fixture(scope="module")
def exchanges() -> list[Any]:
    from tests.support.wire.scenarios import record

    return asyncio.run(record()).exchanges


@pytest.mark.parametrize("provider", UNREADABLE)
def test_the_ai_sdk_reads_every_recorded_answer(exchanges: list[Any], provider: str, tmp_path: Path) -> None:
    dialect = {"open-responses": ("open-responses",)}.get(provider, ("openai", "summary"))
    asked = [
        entry
        for entry in exchanges
        if entry.path == PATHS[provider]
        and entry.dialect in dialect
        and "it died" not in entry.body  # errors are expected to fail
        and not any(word in entry.source or word in entry.body for word in UNREADABLE[provider])
    ]
    file = tmp_path / "answers.ndjson"
    file.write_text("\n".join(json.dumps(asdict(entry)) for entry in asked))
    found = node("ai_sdk.mjs", provider, "replay", str(file))
    print(f"{provider}: {found['checked']} answers read")
    assert found["checked"] == len(asked) > 5
    assert found["errors"] == {}, [(asked[int(n)].source, why) for n, why in found["errors"].items()][:3]


@pytest.mark.parametrize("client", ["chat", "responses", "messages"])
def test_the_typescript_sdks(client: str) -> None:
    with in_thread(in_rounds(ANSWER)) as server:
        found = node("sdks.mjs", client, server.url)
    assert (found["streamed"], found["body"]) == ("Forty-two.", "Forty-two.")
    if client == "messages":
        assert found["block"] == {"type": "text", "text": "Forty-two."}


def test_the_typescript_sdks_tools() -> None:
    script = in_rounds(call("weather", '{"city":"Paris"}') + CALL, FINAL + "Take an umbrella." + END)
    with in_thread(script) as server:
        assert node("sdks.mjs", "chattools", server.url) == {"body": "Take an umbrella."}
        assert "It rains in Paris." in server.prompts()[1]
    with in_thread(in_rounds(call("weather", '{"city":"Paris"}') + CALL)) as server:
        assert node("sdks.mjs", "messagestools", server.url) == {"input": {"city": "Paris"}}
