"""Every measured failure of the strict parser, and what this one makes of it (no special token in text).

``test_parser_properties.py`` has well-formed messages of every channel, recipient and content type.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from chorale.harmony.header import ToolNames
from chorale.harmony.messages import ContentDelta, HarmonyEvent, MessageEnd, MessageStart, Repair, Terminator
from chorale.harmony.parser import Parser
from chorale.harmony.vocab import Vocabulary, load_vocabulary

END, RETURN, CALL = Terminator.END, Terminator.RETURN, Terminator.CALL
CUT, IMPLICIT = Terminator.CUT, Terminator.IMPLICIT
TOOLS = ("functions.f", "functions.get_weather", "functions.a", "browser.search", "python")


@dataclass
class Parsed:
    channel: str
    recipient: str | None
    content_type: str | None
    text: str = ""
    end: Terminator | None = None


@dataclass
class Reading:
    messages: list[Parsed] = field(default_factory=list)
    repairs: list[str] = field(default_factory=list)


def read(events: list[HarmonyEvent]) -> Reading:
    out = Reading()
    for event in events:
        match event:
            case MessageStart(channel, recipient, content_type):
                assert not out.messages or out.messages[-1].end is not None
                out.messages.append(Parsed(channel, recipient, content_type))
            case ContentDelta(text, _):
                assert out.messages[-1].end is None
                out.messages[-1].text += text
            case MessageEnd(terminator, _):
                out.messages[-1].end = terminator
            case Repair(kind):
                out.repairs.append(kind)
    return out


def parse(vocab: Vocabulary, text: str, tools: tuple[str, ...] | None = TOOLS) -> Reading:
    parser = Parser(vocab, tool_names=tools)
    events = parser.feed_all(vocab.encode_with_special(text))
    return read([*events, *parser.finish()])


def message(
    channel: str, recipient: str | None, content_type: str | None, text: str, end: Terminator = CALL
) -> Parsed:
    return Parsed(channel, recipient, content_type, text, end)


def final(text: str, end: Terminator = RETURN) -> Parsed:
    return Parsed("final", None, None, text, end)


CALL_F = message("commentary", "functions.f", "json", "{}")
WEATHER = message("commentary", "functions.get_weather", None, "{}")
WEATHER_JSON = message("commentary", "functions.get_weather", "json", "{}")
HM = message("analysis", None, None, "Hm.", END)
HI = message("commentary", None, None, "Hi", END)
PLAIN = "The answer to your question, in one word, is: 42.\n\nDo you want more?"

# Headers of a call whose arguments are {}; the message that each means, and what was repaired.
HEADERS: list[tuple[str, Parsed, set[str]]] = [
    ("<|channel|>commentary to=functions.f <|constrain|>json", CALL_F, set()),
    ("<|channel|>commentary to=functions.f<|constrain|>json", CALL_F, set()),
    (" to=functions.f<|channel|>commentary <|constrain|>json", CALL_F, set()),
    (" to=functions.f<|channel|>commentary json", CALL_F, set()),
    ("<|channel|>commentary to=functions.f json", CALL_F, set()),
    (
        "<|channel|>commentary to=functions.f<|channel|>commentary <|constrain|>json",
        CALL_F,
        {"junk_in_header"},
    ),
    ("<|channel|>commentary to=functions.a to=functions.f json", CALL_F, {"duplicate_recipient"}),
    ("<|channel|>commentary to=functions.f json to=functions.f", CALL_F, {"duplicate_recipient"}),
    ("<|channel|>commentary to=functions.f to=!!! json", CALL_F, {"duplicate_recipient", "glued_token"}),
    ("<|channel|>commentary now calling to=functions.f json", CALL_F, {"junk_in_header"}),
    ("<|channel|>commentaryto=functions.f json", CALL_F, set()),
    # Glued names. The first two spell the marker out in ordinary text.
    ("<|channel|>commentary to=functions.get_weather<\u200b|channel|>commentary", WEATHER, {"glued_token"}),
    ("<|channel|>commentary to=functions.get_weatherjson", WEATHER, {"glued_token"}),
    ("<|channel|>commentary to=get_weather json", WEATHER_JSON, {"glued_token"}),
    ("<|channel|>commentary to=functions.getWeather json", WEATHER_JSON, {"glued_token"}),
    ("<|channel|>commentary to=functions.get_wether json", WEATHER_JSON, {"glued_token"}),
]
ROWS: list[tuple[str, list[Parsed], set[str]]] = [
    *((f"{header}<|message|>{{}}<|call|>", [meant], repairs) for header, meant, repairs in HEADERS),
    (
        "<|channel|>analysis<|message|>Hm.<|end|>commentary to=functions.f json<|message|>{}<|call|>",
        [HM, CALL_F],
        {"implicit_start", "junk_in_header"},
    ),
    (
        "<|channel|>analysis<|message|>Hm.<|end|>"
        "<|channel|>commentary to=functions.f json<|message|>{}<|call|>",
        [HM, CALL_F],
        {"implicit_start"},
    ),
    (
        "<|channel|>analysis<|message|>Hm.<|end|>assistant<|channel|>final<|message|>Hi<|return|>",
        [HM, final("Hi")],
        {"implicit_start"},
    ),
    (
        "<|channel|>analysis<|message|>Hm.<|end|>assistantfinal<|message|>Hi<|return|>",
        [HM, final("Hi")],
        {"implicit_start", "junk_in_header"},
    ),
    ("<|channel|>finalanalysis<|message|>Hi<|return|>", [final("Hi")], {"unknown_channel"}),
    ("<|channel|>comment<|message|>Hi<|end|>", [HI], {"unknown_channel"}),
    ("<|channel|>commentary??<|message|>Hi<|end|>", [HI], {"unknown_channel"}),
    ("<|message|>hi<|return|>", [final("hi")], {"missing_header"}),
    ("Hi<|return|>", [final("Hi")], {"missing_header"}),
    ("Hi", [final("Hi", CUT)], {"missing_header"}),
    (PLAIN, [final(PLAIN, CUT)], {"missing_header"}),
    (
        "<|channel|>final<|message|>One<|channel|>final<|message|>Two<|return|>",
        [final("One", IMPLICIT), final("Two")],
        {"channel_in_content"},
    ),
    (
        "<|channel|>analysis<|message|>One<|start|>assistant<|channel|>final<|message|>Two<|return|>",
        [message("analysis", None, None, "One", IMPLICIT), final("Two")],
        {"implicit_start"},
    ),
    ("<|channel|>analysis<|message|>Hm<|return|>", [message("analysis", None, None, "Hm", RETURN)], set()),
    ("<|channel|>analysis<|message|>Hm<|call|>", [message("analysis", None, None, "Hm", CALL)], set()),
    ("<|channel|>commentary to=functions.f", [], {"cut_header"}),
    ("<|channel|>", [], {"cut_header"}),
    ("<|channel|>comm", [], {"cut_header"}),
    ("<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant", [HM], {"cut_header"}),
    ("<|channel|>analysis<|return|>", [], {"cut_header"}),
    ("<|channel|>final Hello, you.<|return|>", [final("Hello, you.")], {"missing_header"}),
    (
        '<|channel|>commentary to=functions.f json {"a": 1}<|call|>',
        [message("commentary", "functions.f", "json", '{"a": 1}')],
        {"missing_header"},
    ),
    # nothing counts after the first <|return|>.
    (
        "<|channel|>final<|message|>Hi<|return|><|start|>assistant<|channel|>final<|message|>Again<|return|>",
        [final("Hi")],
        {"tokens_after_end"},
    ),
    # Special tokens are never text.
    (
        "<|channel|>final<|message|>a<|message|>b<|constrain|>c<|reserved_200013|>d<|startoftext|><|return|>",
        [final("abcd")],
        {"reserved_token"},
    ),
    ("<|start|>assistant<|channel|>final<|message|>Hi<|return|>", [final("Hi")], {"junk_in_header"}),
    ("<|channel|>commentary to=assistant<|message|>Hi<|end|>", [HI], set()),
    (
        "<|channel|>commentary to=<|constrain|>json<|message|>{}<|end|>",
        [message("commentary", None, "json", "{}", END)],
        set(),
    ),
]


@pytest.mark.parametrize(("text", "messages", "repairs"), ROWS, ids=[row[0][:60] for row in ROWS])
def test_each_row_of_the_table(
    vocab: Vocabulary, text: str, messages: list[Parsed], repairs: set[str]
) -> None:
    reading = parse(vocab, text)
    assert reading.messages == messages
    assert set(reading.repairs) == repairs


def test_a_repaired_message_has_as_many_tokens_as_its_text(vocab: Vocabulary) -> None:
    """Log-probabilities and reasoning tokens are counted by it."""
    body = "The quick brown fox jumps over the lazy dog, and then it sleeps for a long while in the sun."
    ids = vocab.encode_with_special("<|channel|>analysis\n" + body + "<|end|>")
    events = Parser(vocab, tool_names=TOOLS).feed_all(ids)
    assert [event.kind for event in events if isinstance(event, Repair)] == ["missing_header"]
    deltas = [event for event in events if isinstance(event, ContentDelta)]
    text = "".join(delta.text for delta in deltas)
    assert body in text
    assert sum(delta.num_tokens for delta in deltas) == len(vocab.encode(text))


def test_a_stray_special_token_is_kept_for_replay(vocab: Vocabulary) -> None:
    for stray in ("<|constrain|>", "<|message|>", "<|reserved_200014|>"):
        content = vocab.encode_with_special(f"one{stray} two")
        ids = [*vocab.encode_with_special("<|channel|>final<|message|>"), *content]
        events = Parser(vocab).feed_all([*ids, *vocab.encode_with_special("<|return|>")])
        (end,) = (event for event in events if isinstance(event, MessageEnd))
        assert list(end.token_ids)[: len(ids)] == ids
        assert "".join(event.text for event in events if isinstance(event, ContentDelta)) == "one two"


def test_marker_spelled_in_text_is_cut_off_the_name(vocab: Vocabulary) -> None:
    ids = [200005, *vocab.encode("commentary to=functions.get_weather<|channel|>commentary"), 200008, 200012]
    reading = read(Parser(vocab, tool_names=TOOLS).feed_all(ids))
    assert reading.messages == [Parsed("commentary", "functions.get_weather", None, "", CALL)]
    ids = [200005, *vocab.encode("commentary to=python<|constrain|>json"), 200008, 200012]
    for names in (TOOLS, None):
        reading = read(Parser(vocab, tool_names=names).feed_all(ids))
        assert reading.messages == [Parsed("commentary", "python", "json", "", CALL)]
        assert "glued_token" in reading.repairs


def test_ids_out_of_range_are_skipped(vocab: Vocabulary) -> None:
    parser = Parser(vocab)
    ids = vocab.encode_with_special("<|channel|>final<|message|>a")
    events = parser.feed_all([*ids, -1, 201088, 2**40, *vocab.encode("b"), 200002])
    reading = read(events)
    assert reading.messages == [Parsed("final", None, None, "ab", RETURN)]
    assert reading.repairs == ["reserved_token"] * 3
    assert events[-1] == MessageEnd(RETURN, (*ids, *vocab.encode("b")))


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("functions.get_wether", "functions.get_weather"),
        ("functions.del", None),
        ("functions.add_user", None),
        ("functions.addjson", "functions.add"),
        ("functions.zzz", None),
        ("container.exec", None),
    ],
)
def test_a_namespace_does_not_make_names_alike(written: str, meant: str | None) -> None:
    """A call of a function that was never declared must not become one of another function."""
    assert ToolNames(["functions.add", "functions.get_weather", "browser.search"]).nearest(written) == meant


def test_tokens_after_the_end_are_one_repair_however_many() -> None:
    parser = Parser(load_vocabulary())
    parser.feed_all(load_vocabulary().encode_with_special("<|channel|>final<|message|>x<|return|>"))
    events = parser.feed_all(load_vocabulary().encode("and so on and on")) + list(parser.feed(200_000))
    assert events == [Repair("tokens_after_end")]
