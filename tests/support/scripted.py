"""Scripted harmony turns: clients that play them, functions that run a turn, and readers of Chat answers."""

from __future__ import annotations

import contextlib
import re
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import httpx2
import msgspec

from chorale.engine.types import GenerateRequest, SamplingSpec, TokenChunk, TokenLogprobs
from chorale.harmony.messages import ToolDescription
from chorale.turns.events import Fold, OutputEvent
from chorale.turns.functions import Function
from chorale.turns.request import TurnRequest
from chorale.turns.rules import TurnRules
from chorale.turns.run import run_turns
from tests.support.engine.scripted_client import HELLO, Script, ScriptedClient, ids
from tests.support.server import VOCAB
from tests.support.sse import frames

ANALYSIS = "<|channel|>analysis<|message|>"
FINAL = "<|channel|>final<|message|>"
NEXT = "<|end|><|start|>assistant"
PREAMBLE = "<|channel|>commentary<|message|>"


def call(name: str, arguments: str, channel: str = "commentary") -> str:
    return f"<|channel|>{channel} to=functions.{name} <|constrain|>json<|message|>{arguments}"


def playing(*texts: str, **options: Any) -> ScriptedClient:
    """Returns a client: choice ``i`` of any request plays ``texts[i]``, further choices the last one."""

    def source(request: GenerateRequest, index: int) -> Script:
        return Script(ids(texts[min(index, len(texts) - 1)]), **options)

    return ScriptedClient(source)


def scripted(tokens: Sequence[int] = HELLO, **options: Any) -> ScriptedClient:
    """Returns a client on which every request plays these tokens."""
    return ScriptedClient(lambda request, index: Script(tokens, **options))


def in_rounds(*texts: str, **options: Any) -> ScriptedClient:
    """Request ``i`` plays ``texts[i]``."""
    client = ScriptedClient()
    client.play(*texts, **options)
    return client


def changing(
    text: str, change: Callable[[GenerateRequest, TokenChunk], None], **options: Any
) -> ScriptedClient:
    """Passes chunks through ``change(request, chunk)``, for output that scripts cannot express."""
    return ScriptedClient(lambda request, index: Script(ids(text), **options), change=change)


def scoring(text: str, **options: Any) -> ScriptedClient:
    """Plays ``text``; every prompt token but the first has logprob -1.0 and rank 2, after token 7."""

    def change(request: GenerateRequest, chunk: TokenChunk) -> None:
        if chunk.token_ids and chunk.token_ids[0] == ids(text)[0] and chunk.prompt_logprobs is None:
            tail = request.prompt_token_ids[1:]
            chunk.prompt_logprobs = [None, *(TokenLogprobs(t, -1.0, 2, [7], [-0.5]) for t in tail)]

    return changing(text, change, **options)


async def turn(
    client: ScriptedClient, *, n: int = 1, prompt: Sequence[int] = (1, 2, 3), **options: Any
) -> list[Fold]:
    """Runs a turn. Returns the accumulated choices."""
    folds = [Fold() for _ in range(n)]
    async for index, events in batches(client, n=n, prompt=prompt, **options):
        folds[index].add(events)
    return folds


async def batches(
    client: ScriptedClient,
    *,
    n: int = 1,
    prompt: Sequence[int] = (1, 2, 3),
    sampling: SamplingSpec | None = None,
    functions: Sequence[str] = (),
    **options: Any,
) -> AsyncIterator[tuple[int, list[OutputEvent]]]:
    rules = TurnRules(functions=[Function(ToolDescription(name)) for name in functions])
    sampling = sampling or SamplingSpec(n=n, max_tokens=1000)
    of_sampling = {name: options.pop(name) for name in ("min_tokens", "ignore_eos") if name in options}
    request = TurnRequest(
        request_id="r",
        prompt_token_ids=list(prompt),
        sampling=msgspec.structs.replace(sampling, **of_sampling),
        rules=rules,
        **options,
    )
    turns = run_turns(client, VOCAB, request)
    async with contextlib.aclosing(turns):
        async for batch in turns:
            for index, events in batch:
                yield index, events


def events_of(response: httpx2.Response) -> list[Any]:
    """Returns the JSON of each server-sent event; asserts the framing and the final ``[DONE]``."""
    assert response.status_code == 200, response.text
    assert response.text.endswith("\n\ndata: [DONE]\n\n")
    return frames(response)


def fold_chat(chunks: Sequence[Any]) -> dict[int, dict[str, Any]]:
    """Returns the choices, accumulated from chunks as clients do it."""
    choices: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            state = choices.setdefault(
                choice["index"],
                {"content": "", "reasoning": "", "reasoning_content": "", "calls": {}, "logprobs": []},
            )
            _fold_delta(state, choice)
    return choices


def _fold_delta(state: dict[str, Any], choice: dict[str, Any]) -> None:
    delta = choice["delta"]
    for key in ("content", "reasoning", "reasoning_content"):
        state[key] += delta.get(key) or ""
    for piece in delta.get("tool_calls", ()):
        made = state["calls"].setdefault(piece["index"], {"id": None, "name": "", "arguments": ""})
        made["id"] = piece.get("id", made["id"])
        made["name"] += piece["function"].get("name", "")
        made["arguments"] += piece["function"].get("arguments", "")
    if choice["logprobs"]:
        state["logprobs"] += choice["logprobs"]["content"]
    if choice["finish_reason"]:
        assert "finish_reason" not in state, "finished twice"
        state["finish_reason"] = choice["finish_reason"]
        state["stop_reason"] = choice["stop_reason"]


def without_ids(choice: dict[str, Any]) -> dict[str, Any]:
    calls = {index: {**made, "id": None} for index, made in choice["calls"].items()}
    assert all(re.fullmatch(r"call_[0-9a-f]{32}", made["id"]) for made in choice["calls"].values())
    return {**choice, "calls": calls}
