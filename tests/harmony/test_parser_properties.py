"""What holds for every stream of ids, and for every well-formed turn."""

from __future__ import annotations

import random
import time
from collections.abc import Iterable, Sequence

import pytest

from chorale.harmony.messages import (
    ContentDelta,
    HarmonyEvent,
    Message,
    MessageEnd,
    MessageStart,
    Repair,
    Terminator,
)
from chorale.harmony.parser import Parser
from chorale.harmony.render import render_message
from chorale.harmony.vocab import (
    CALL,
    CHANNEL,
    CONSTRAIN,
    END,
    ENDOFTEXT,
    MESSAGE,
    NUM_RANKS,
    RETURN,
    START,
    STARTOFTEXT,
    VOCAB_SIZE,
    Vocabulary,
)
from tests.harmony.conversations import text

STREAMS = 40_000
TOOLS = ("functions.f", "functions.get_weather", "browser.search", "python")
CONTROL = [
    START, END, RETURN, CALL, CHANNEL, MESSAGE, CONSTRAIN, STARTOFTEXT, ENDOFTEXT, 200013, 201087, 201088,
    -1,
]  # fmt: skip
PHRASES = ["assistant", "analysis", "commentary", "final",
           " to=functions.f", " to=", "json", " code", "f", "\n", " ", "é",
           "🧿", "{", "}", "user", "functions.get_weather", "<|channel|>", "<|", "|>", "finalanalysis",
           "Hello", ",", "日"]  # fmt: skip


def random_stream(rng: random.Random, phrases: Sequence[Sequence[int]]) -> list[int]:
    out: list[int] = []
    for _ in range(rng.randint(1, 12)):
        if rng.random() < 0.45:
            out.append(rng.choice(CONTROL))
        elif rng.random() < 0.1:
            out.append(rng.randrange(NUM_RANKS))  # often half a character
        else:
            out += rng.choice(phrases)
    return out


def check_grammar(events: Iterable[HarmonyEvent]) -> None:
    """Messages open and close in turn; text belongs to an open message, and is never empty."""
    is_open = False
    for event in events:
        match event:
            case MessageStart(channel, recipient, content_type):
                assert not is_open
                is_open = True
                assert channel in ("analysis", "commentary", "final")
                assert recipient != ""
                assert "<|" not in (recipient or "")
                assert "<|" not in (content_type or "")
            case ContentDelta(text, num_tokens):
                assert is_open
                assert text
                assert num_tokens >= 0
            case MessageEnd(_, token_ids):
                assert is_open
                is_open = False
                assert all(0 <= i < VOCAB_SIZE for i in token_ids)
            case Repair():
                pass
    assert not is_open


@pytest.mark.parametrize("part", range(4))
def test_random_control_token_streams(vocab: Vocabulary, part: int) -> None:
    rng = random.Random(part)
    phrases = [vocab.encode(phrase) for phrase in PHRASES]
    for _ in range(STREAMS // 4):
        ids = random_stream(rng, phrases)
        parser = Parser(vocab, tool_names=rng.choice([TOOLS, None]))
        events = [*parser.feed_all(ids), *parser.finish()]
        check_grammar(events)
        assert list(parser.finish()) == []
        num_text = sum(0 <= i < NUM_RANKS for i in ids)
        assert sum(e.num_tokens for e in events if isinstance(e, ContentDelta)) <= num_text


def test_content_equals_the_decoded_tokens(vocab: Vocabulary) -> None:
    """Any ordinary ids, also broken UTF-8: deltas add up to the text, counts to the tokens."""
    rng = random.Random(6)
    head = vocab.encode_with_special("<|channel|>final<|message|>")
    for _ in range(2000):
        ids = [rng.randrange(NUM_RANKS) if rng.random() < 0.7 else rng.randrange(128, 256) for _ in range(30)]
        events = Parser(vocab).feed_all([*head, *ids, RETURN])
        deltas = [e for e in events if isinstance(e, ContentDelta)]
        assert "".join(d.text for d in deltas) == vocab.decode(ids)
        assert sum(d.num_tokens for d in deltas) == len(ids)
        assert events[-1] == MessageEnd(Terminator.RETURN, (*head, *ids))


# --------------------------------------------------------------------------- well-formed turns


def model_turn(rng: random.Random, vocab: Vocabulary) -> tuple[list[int], list[Message], list[Terminator]]:
    """Ids as the model emits them (channel before recipient), and the messages they are."""
    ids: list[int] = []
    messages, ends = [], []
    count = rng.randint(1, 4)
    for index in range(count):
        recipient = rng.choice([None, *TOOLS])
        channel = rng.choice(["analysis", "commentary", "final"])
        kind = rng.choice([None, "json", "code", "<|constrain|>json"])
        head = (
            "<|channel|>" + channel + (f" to={recipient}" if recipient else "") + (f" {kind}" if kind else "")
        )
        content = text(rng)
        body = [*vocab.encode_with_special(head + "<|message|>"), *vocab.encode(content)]
        is_last = index == count - 1
        end = CALL if recipient else RETURN if is_last else END
        ids += [*([START, *vocab.encode("assistant")] if index else []), *body, end]
        messages.append(Message("assistant", content, None, recipient, channel, kind, tuple(body)))
        ends.append({CALL: Terminator.CALL, RETURN: Terminator.RETURN, END: Terminator.END}[end])
    return ids, messages, ends


def parse_messages(events: Iterable[HarmonyEvent]) -> tuple[list[Message], list[Terminator]]:
    messages, ends, start, content = [], [], MessageStart("final", None, None), ""
    for event in events:
        match event:
            case MessageStart():
                start, content = event, ""
            case ContentDelta(text, _):
                content += text
            case MessageEnd(terminator, token_ids):
                ends.append(terminator)
                messages.append(
                    Message(
                        "assistant",
                        content,
                        None,
                        start.recipient,
                        start.channel,
                        start.content_type,
                        token_ids,
                    )
                )
            case Repair():
                raise AssertionError(event)
    return messages, ends


def plain(kind: str | None) -> str | None:
    return None if kind is None else kind.removeprefix("<|constrain|>")


def test_parse_of_a_turn_replays_its_exact_ids(vocab: Vocabulary) -> None:
    rng = random.Random(7)
    for _ in range(1500):
        ids, written, written_ends = model_turn(rng, vocab)
        messages, ends = parse_messages(Parser(vocab, tool_names=TOOLS).feed_all(ids))
        assert ends == written_ends
        assert [m.token_ids for m in messages] == [m.token_ids for m in written]
        assert [(m.channel, m.recipient, m.content_type, m.content) for m in messages] == [
            (m.channel, m.recipient, plain(m.content_type), m.content) for m in written
        ]
        replayed = [i for m in messages for i in render_message(m, vocab)]
        expected = [START, *vocab.encode("assistant"), *ids]
        if expected[-1] == RETURN:
            expected[-1] = END  # history closes an answer with <|end|>
        assert replayed == expected


def test_parse_of_a_rendered_message_is_the_message(vocab: Vocabulary) -> None:
    """The other header order, which is rendered for messages that came as JSON."""
    rng = random.Random(8)
    for _ in range(1500):
        _, written, _ = model_turn(rng, vocab)
        for message in written:
            foreign = Message(
                "assistant", message.content, None, message.recipient, message.channel, message.content_type
            )
            ids = render_message(foreign, vocab)
            parser = Parser(vocab, role=None, tool_names=TOOLS)
            (parsed,), _ = parse_messages([*parser.feed_all(ids), *parser.finish()])
            assert (parsed.channel, parsed.recipient) == (message.channel, message.recipient)
            assert (parsed.content_type, parsed.content) == (plain(message.content_type), message.content)
            assert render_message(parsed, vocab) == ids


# --------------------------------------------------------------------------- cost


def test_a_content_token_costs_little(vocab: Vocabulary) -> None:
    """Measured: 0.07 us a token once it was seen, 2.4 us the first time. The bar is 1.5 us, here tripled."""
    ids = vocab.encode("The quick brown fox jumps over the lazy dog, and then it sleeps. " * 300)
    parser = Parser(vocab)
    parser.feed_all(vocab.encode_with_special("<|channel|>final<|message|>"))
    best = min(_seconds(parser, ids) for _ in range(5)) / len(ids)
    print(f"\nfeed: {best * 1e6:.3f} us per content token")
    assert best < 3 * 1.5e-6


def _seconds(parser: Parser, ids: list[int]) -> float:
    begin = time.thread_time()
    for token_id in ids:
        parser.feed(token_id)
    return time.thread_time() - begin


def test_a_runaway_header_costs_linear_time(vocab: Vocabulary) -> None:
    tools = [f"functions.tool_{i}" for i in range(128)]
    for junk in ("to=functions.f ", "aaaa bbbb ", "to=" + "a" * 4000, "\n", "to=to=", "<|channel|>x"):
        ids = vocab.encode(junk * (100_000 // len(junk)))
        parser = Parser(vocab, tool_names=tools)
        begin = time.thread_time()
        parser.feed_all([CHANNEL, *ids, MESSAGE])
        parser.finish()
        assert time.thread_time() - begin < 2.0, junk
