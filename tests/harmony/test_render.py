"""Cases beyond ``test_render_oracle``: replay, dropped reasoning, and text that looks like special tokens."""

from __future__ import annotations

import pytest

from chorale.harmony.builtin_tools import python_tool
from chorale.harmony.messages import DeveloperContent, Message, ResponseFormat, SystemContent
from chorale.harmony.render import kept_messages, render_conversation, render_developer, render_message
from chorale.harmony.vocab import Vocabulary


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
