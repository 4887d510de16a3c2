"""Rendering: ids equal openai-harmony's over random conversations; what it does not render, or drop."""

from __future__ import annotations

import random
from typing import Any

import openai_harmony as oh
import pytest

from chorale.harmony.builtin_tools import python_tool
from chorale.harmony.messages import DeveloperContent, Message, ResponseFormat, SystemContent
from chorale.harmony.render import kept_messages, render_conversation, render_developer, render_message
from chorale.harmony.schema_ts import compact_json, schema_to_typescript
from chorale.harmony.vocab import Vocabulary
from tests.harmony.conversations import conversation, schema, to_oracle, value


def test_the_text_of_python_names_its_kind() -> None:
    stateless = python_tool(stateful=False).description or ""
    stateful = python_tool(stateful=True).description or ""
    assert "STATELESS" in stateless
    assert "Jupyter" in stateful
    assert "STATELESS" not in stateful


def test_response_formats_follow_the_tools() -> None:
    schema = {"type": "object", "properties": {"naïve": {"type": "string"}}}
    content = DeveloperContent("Hi.", (), (ResponseFormat("answer", schema, "What to say.\nIn short."),))
    assert render_developer(content) == (
        "# Instructions\n\nHi.\n\n# Response Formats\n\n## answer\n\n// What to say.\n// In short.\n"
        '{"type":"object","properties":{"naïve":{"type":"string"}}}'
    )


@pytest.mark.parametrize(
    "message",
    [Message("tool", "result"), Message("user", SystemContent()), Message("system", DeveloperContent("x"))],
)
def test_messages_without_a_wire_form_are_refused(vocab: Vocabulary, message: Message) -> None:
    with pytest.raises(ValueError, match=r"tool message|is not allowed in"):
        render_message(message, vocab)


# --------------------------------------------------------------------------- what is dropped


def chain(letters: str) -> list[Message]:
    """u user, r reasoning, f final, p preamble, c call, t its result, b a call on the analysis channel."""
    kinds = {
        "u": Message("user", "u"),
        "r": Message("assistant", "r", channel="analysis"),
        "f": Message("assistant", "f", channel="final"),
        "p": Message("assistant", "p", channel="commentary"),
        "c": Message("assistant", "c", recipient="functions.f", channel="commentary"),
        "t": Message("tool", "t", "functions.f", "assistant", "commentary"),
        "b": Message("assistant", "b", recipient="python", channel="analysis"),
    }
    return [kinds[letter] for letter in letters]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("urf", "urf"),  # no user message since: the turn may go on
        ("urfu", "ufu"),
        ("urprctrfurct", "upctfurct"),
        ("urbturfu", "ubtufu"),
        ("urfurfurct", "ufufurct"),
        ("urctrurf", "urctrurf"),
    ],
)
def test_reasoning_before_the_last_answer_is_dropped(vocab: Vocabulary, before: str, after: str) -> None:
    whole = chain(before)
    kept = kept_messages(whole)
    assert [m.content for m in kept] == list(after)
    assert render_conversation(whole, vocab) == render_conversation(kept, vocab, drop_analysis=False)


# --------------------------------------------------------------------------- the oracle

CASES = 5000


@pytest.mark.parametrize("part", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, 5))])
def test_ids_equal_openai_harmony(vocab: Vocabulary, oracle: oh.HarmonyEncoding, part: int) -> None:
    size = CASES // 5
    for seed in range(part * size, (part + 1) * size):
        ours = conversation(random.Random(seed))
        theirs = to_oracle(ours)
        keep = oh.RenderConversationConfig(auto_drop_analysis=False)
        expected = oracle.render_conversation_for_completion(theirs, oh.Role.ASSISTANT, keep)
        found = render_conversation(ours, vocab, drop_analysis=False)
        assert found == expected, (
            f"seed {seed}\nours     {vocab.decode(found)!r}\nexpected {vocab.decode(expected)!r}"
        )


# --------------------------------------------------------------------------- schemas


def test_odd_schemas_do_not_raise() -> None:
    deep: dict[str, Any] = {"type": "array"}
    for _ in range(5000):
        deep = {"type": "array", "items": deep}
    cyclic: dict[str, Any] = {"type": "object", "properties": {}}
    cyclic["properties"]["again"] = cyclic
    odd = [
        None,
        True,
        3,
        "x",
        [],
        deep,
        cyclic,
        {"type": {}},
        {"oneOf": 5},
        {"type": "object", "properties": []},
    ]
    odd += [
        {"oneOf": [None, 5, {"default": deep}]},
        {"type": "object", "properties": {"x": None, "y": 5}},
        {"type": "array", "items": None},
    ]
    odd += [{"type": "object", "properties": {5: {"type": "string"}}, "required": [{}]}]
    for given in odd:
        assert isinstance(schema_to_typescript(given), str)
    assert schema_to_typescript(deep).startswith("any[]")
    rng = random.Random(0)
    for _ in range(5000):
        schema_to_typescript(rng.choice([schema, value])(rng))


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"a": [1, 2.0, None, True]}, '{"a":[1,2.0,null,true]}'),
        (1e20, "1e20"),
        (-2.5e-5, "-0.000025"),
        (3.25e-7, "3.25e-7"),
        (1e15, "1000000000000000.0"),
        (float("nan"), "null"),
        ("é\n", '"é\\n"'),
        ({1: {2}}, '{"1":"{2}"}'),
    ],
)
def test_compact_json(given: Any, expected: str) -> None:
    assert compact_json(given) == expected
