"""The wording of errors that people or clients rely on. Other tests check types, codes and parameters."""

from __future__ import annotations

from typing import Any

import pytest

from chorale.config.engine import ServerConfig
from tests.support.scripted import FINAL, playing
from tests.support.server import served

CHAT = "/v1/chat/completions"
ASK = {"messages": [{"role": "user", "content": "Hi"}]}
LONG = [1] * 131_073
OUTPUT = {"type": "function_call_output", "call_id": "call_zzz", "output": "21"}
# Name -> (path, body, fields of ``ServerConfig``, words in the message).
WORDS: dict[str, tuple[str, dict[str, Any], dict[str, Any], str]] = {
    # LiteLLM and others recognize the error by these words.
    "window": ("/v1/completions", {"prompt": LONG}, {}, "This model's maximum context length is 131072"),
    "hint": (CHAT, {**ASK, "max_tokenz": 5}, {"unknown_fields": "refuse"}, "did you mean 'max_tokens'?"),
    "many biases": (
        CHAT,
        {**ASK, "logit_bias": {str(key): 1 for key in range(-1, -26, -1)}},
        {},
        "'-20' and 5 more",
    ),
    "no such endpoint": ("/invocations", {"model": "demo"}, {}, "messages (chat)"),
    "no call": (
        "/v1/responses",
        {"input": [OUTPUT]},
        {},
        "No tool call found for function call output with call_id call_zzz.",
    ),
    "no such response": ("/v1/responses/resp_0/cancel", {}, {}, "resp_0"),
    "chat at responses": ("/v1/responses", ASK, {}, "`messages` belongs to /v1/chat/completions"),
    "no tools": (CHAT, {**ASK, "tools": [{"type": "web_search"}]}, {}, "--tool-server"),
}


@pytest.mark.parametrize("name", WORDS)
async def test_an_error_message_contains_the_expected_words(name: str) -> None:
    path, body, config, words = WORDS[name]
    async with served(playing(FINAL + "ok<|return|>"), settings=ServerConfig(port=0, **config)) as server:
        response = await server.http.post(path, json=body)
        assert words in response.json()["error"]["message"]
