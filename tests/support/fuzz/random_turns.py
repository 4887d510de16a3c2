"""Random turns: of well-formed messages, of malformed ones, and of control tokens thrown in anywhere."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from chorale.harmony.vocab import CALL, CHANNEL, CONSTRAIN, END, MESSAGE, RETURN, START
from tests.support.engine.scripted_client import Script, ScriptedClient
from tests.support.scripted import ANALYSIS, FINAL, PREAMBLE, call, ids
from tests.support.server import VOCAB

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
