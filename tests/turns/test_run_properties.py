"""Whatever the model writes and however its tokens are cut, the stream folds to the body.

Random turns are built of well-formed messages, of malformed ones, and of control tokens thrown in anywhere.
"""

from __future__ import annotations

import asyncio
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from chorale.harmony.vocab import CALL, CHANNEL, CONSTRAIN, END, MESSAGE, RETURN, START
from tests.support.engine.scripted_client import Script, ScriptedClient
from tests.support.scripted import (
    ANALYSIS,
    FINAL,
    PREAMBLE,
    call,
    events_of,
    fold_chat,
    ids,
    of_body,
    without_ids,
)
from tests.support.server import VOCAB, served

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=12) | st.sampled_from(
    ["Hello there.", "née 🧑‍🚀 漢字", " STOP ", "\n\nST", '{"a": 1}', "", "to=functions.f", "<|end|>"]
)
HEADERS = st.sampled_from(
    [
        ANALYSIS,
        FINAL,
        PREAMBLE,
        call("f", ""),
        call("g", "", "analysis"),
        call("nobody", ""),
        "<|channel|>commentary to=functions.f to=functions.f<|message|>",
        "<|channel|>finalanalysis<|message|>",
        "<|message|>",
        " to=functions.g<|channel|>commentary json<|message|>",
        "",
    ]
)
ENDS = st.sampled_from(["<|end|><|start|>assistant", "<|end|>", "<|call|>", "<|call|><|start|>assistant", ""])
MESSAGES = st.lists(st.tuples(HEADERS, TEXTS, ENDS), min_size=1, max_size=4)
CONTROL = st.sampled_from([START, END, MESSAGE, CHANNEL, CONSTRAIN, CALL, 200001, *VOCAB.encode("🧑‍🚀")])
LAST = st.sampled_from([[RETURN], [CALL], []])
TOOLS = [{"type": "function", "function": {"name": name}} for name in ("f", "g")]


@st.composite
def streams(draw: st.DrawFn) -> list[int]:
    tokens: list[int] = []
    for header, text, end in draw(MESSAGES):
        tokens += [*ids(header), *VOCAB.encode(text), *ids(end)]
    for control in draw(st.lists(CONTROL, max_size=2)):
        tokens.insert(draw(st.integers(0, len(tokens))), control)
    return [*tokens, *draw(LAST)]


def client_of(tokens: list[int], step: int) -> ScriptedClient:
    """Forced answers play a fixed text, so that they are covered too."""

    def source(request: Any, index: int) -> Script:
        # The engine stops at the model's own stop ids; only parallel calls are played beyond one.
        if "." in request.request_id:
            return Script(ids("forced<|return|>"), tokens_per_step=step, with_logprobs=True)
        return Script(tokens, tokens_per_step=step, with_logprobs=True)

    return ScriptedClient(source)


quick = settings(deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow])


@quick
@given(streams(), st.integers(1, 64), st.sampled_from([1, 3, 20]), st.booleans(), st.booleans())
def test_fold_of_the_chat_stream_is_the_body(
    tokens: list[int], step: int, interval: int, with_stop: bool, with_logprobs: bool
) -> None:
    fields: dict[str, Any] = {"tools": TOOLS, "logprobs": with_logprobs}
    if with_stop:
        fields["stop"] = ["STOP"]

    async def main() -> None:
        async with served(client_of(tokens, 1), stream_interval=interval) as whole:
            body = (await whole.chat(**fields)).json()
        async with served(client_of(tokens, step), stream_interval=interval) as cut:
            options = {"include_usage": True}
            chunks = events_of(await cut.chat(stream=True, stream_options=options, **fields))
        assert without_ids(fold_chat(chunks)[0]) == without_ids(of_body(body["choices"][0]))
        assert chunks[-1]["usage"] == body["usage"]
        usage = body["usage"]
        reasoning = usage["completion_tokens_details"]["reasoning_tokens"]
        visible = len((body["choices"][0]["logprobs"] or {}).get("content") or [])
        assert reasoning + visible <= usage["completion_tokens"]
        for made in fold_chat(chunks)[0]["calls"].values():
            assert made["name"] in ("f", "g")
            assert made["arguments"] or fold_chat(chunks)[0]["finish_reason"] == "length"

    asyncio.run(main())
