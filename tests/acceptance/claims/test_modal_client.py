"""Modal's example client waits for /health, sends a complete system prompt, and reads either delta field."""

from __future__ import annotations

import pytest

from tests.support.faces import send
from tests.support.scripted import ANALYSIS, FINAL, NEXT, playing
from tests.support.server import served
from tests.support.sse import frames

SYSTEM = """You are ChatGPT, a large language model trained by OpenAI.
Knowledge cutoff: 2024-06
Current date: 2026-01-02

Reasoning: low

# Valid channels: analysis, commentary, final. Channel must be included for every message."""


@pytest.mark.parametrize("model", ["demo", "gpt-oss-20b"])
async def test_the_modal_client_works_unchanged(model: str) -> None:
    async with served(playing(ANALYSIS + "Think." + NEXT + FINAL + "Hello.<|return|>")) as server:
        assert (await server.http.get("/health")).status_code == 200
        names = [entry["id"] for entry in (await server.http.get("/v1/models")).json()["data"]]
        assert names == ["demo", "gpt-oss-20b"]
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "hi"}]
        body = {"model": model, "messages": messages, "stream": True}
        read = ""
        for chunk in frames(await send(server, "chat", body)):
            delta = chunk["choices"][0]["delta"]
            read += delta.get("content") or delta.get("reasoning_content") or ""
        assert read == "Think.Hello."
        system, developer = server.prompt().split("<|end|>")[:2]
        assert system.startswith("<|start|>system<|message|>")
        assert "\n\nReasoning: low\n\n" in system  # the instructions' effort, only here
        kept = SYSTEM.replace("Reasoning: low\n", "")
        assert developer == f"<|start|>developer<|message|># Instructions\n\n{kept}"
