"""What a turn's grammar lets through: harmony text in, yes or no."""

from __future__ import annotations

import numpy as np
import pytest

from chorale.errors import RequestError
from chorale.grammar import constraint as make
from chorale.grammar.frames import MAX_REASONING, Call, Frames, raw_grammar, turn_grammar
from chorale.grammar.matcher import check_constraint, compile_grammar, explain
from chorale.harmony.vocab import NUM_RANKS, load_vocabulary

VOCAB = load_vocabulary()
CITY = make.json_schema(
    {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "p",
)
FINAL = "<|channel|>final<|message|>"
THINK_START, THINK_END = "<|channel|>analysis<|message|>", "<|end|><|start|>assistant"
THINK = THINK_START + "hm, <no> {json}?" + THINK_END
PREAMBLE = "<|channel|>commentary<|message|>Let me look.<|end|><|start|>assistant"
GET = "<|channel|>commentary to=functions.get <|constrain|>json<|message|>"


def accepts(grammar: str, text: str) -> bool:
    matcher = compile_grammar(grammar)
    return bool(matcher.consume_tokens(VOCAB.encode_with_special(text))) and matcher.is_stopped()


def fits(frames: Frames, text: str) -> bool:
    return accepts(turn_grammar(frames), text)


def test_reasoning_messages_are_bounded() -> None:
    """Without a bound a model that cannot stop thinking would meet nothing but the token limit."""
    for frames, answer in ((NONE, "Yes."), (STRUCTURED, '{"city":"Paris"}')):
        text = f"{FINAL}{answer}<|return|>"
        assert fits(frames, THINK * MAX_REASONING + text)
        assert not fits(frames, THINK * (MAX_REASONING + 1) + text)
    assert not fits(NONE, (THINK + PREAMBLE) * MAX_REASONING + FINAL + "Yes.<|return|>")


STRUCTURED = Frames(answer=CITY)
TOOLS = Frames(calls=(Call("get", CITY), Call("get_weather"), Call("g.et-x", CITY)), answer=CITY)
FORCED = Frames(calls=(Call("get", CITY),), answer="none")
NONE = Frames(preambles=True)
BUDGET = Frames(preambles=True, reasoning=(50,), calls=(Call("get", CITY),))


@pytest.mark.parametrize(
    ("frames", "text", "expected"),
    [
        (STRUCTURED, FINAL + '{"city":"Paris"}<|return|>', True),
        (STRUCTURED, "<|channel|>final <|constrain|>json<|message|>" + '{"city": "a"}<|return|>', True),
        (STRUCTURED, THINK + THINK + FINAL + '{\n  "city": "a"\n}<|return|>', True),
        (STRUCTURED, FINAL + '{\n\n"city":"a"}<|return|>', False),  # blanks do not repeat
        (STRUCTURED, FINAL + '{"city":  "a"}<|return|>', False),
        (STRUCTURED, FINAL + '{"city":"a"} <|return|>', False),
        (STRUCTURED, FINAL + '{"town":"a"}<|return|>', False),
        (STRUCTURED, FINAL + '{"city":"<|end|>"}<|return|>', False),
        (STRUCTURED, FINAL + '{"city":"a"}<|end|>', False),
        (STRUCTURED, THINK.removesuffix("<|end|><|start|>assistant") + "<|return|>", False),
        (STRUCTURED, PREAMBLE + FINAL + '{"city":"a"}<|return|>', False),
        (STRUCTURED, GET + '{"city":"a"}<|call|>', False),
        (TOOLS, THINK + GET + '{"city":"a"}<|call|>', True),
        (TOOLS, GET + '{"town":"a"}<|call|>', False),
        (TOOLS, GET + '{"city":"a"}<|return|>', False),
        (TOOLS, GET.replace("get", "get_weather") + "any text<|call|>", True),
        (TOOLS, GET.replace("get", "g.et-x") + '{"city":"a"}<|call|>', True),
        (TOOLS, GET.replace("get", "other") + '{"city":"a"}<|call|>', False),
        (TOOLS, ' to=functions.get<|channel|>commentary json<|message|>{"city":"a"}<|call|>', True),
        (TOOLS, THINK + ' to=functions.get<|channel|>commentary<|message|>{"city":"a"}<|call|>', True),
        (TOOLS, FINAL + '{"city":"a"}<|return|>', True),
        (FORCED, THINK + GET + '{"city":"a"}<|call|>', True),
        (FORCED, FINAL + '{"city":"a"}<|return|>', False),
        (NONE, THINK + PREAMBLE + THINK + FINAL + "free text<|return|>", True),
        (NONE, FINAL + "<|return|>", False),  # never an empty answer
        (NONE, GET + "{}<|call|>", False),
        # Preambles go on where a budget bounds the reasoning.
        (BUDGET, PREAMBLE + FINAL + "Yes.<|return|>", True),
        (BUDGET, THINK + PREAMBLE + FINAL + "Yes.<|return|>", True),
        (BUDGET, PREAMBLE + GET + '{"city":"a"}<|call|>', True),
    ],
)
def test_a_grammar_accepts_valid_turns_only(frames: Frames, text: str, expected: bool) -> None:
    assert fits(frames, text) is expected


@pytest.mark.parametrize(("bounds", "lengths", "expected"), [
    ((), [], True),
    ((0,), [], True),
    ((3,), [3], True),
    ((3,), [4], False),
    ((3,), [1, 1], False),
    ((3, 2), [3, 2], True),
    ((3, 2), [0, 2], True),
    ((3, 2), [3, 3], False),
    ((3, 2), [1, 1, 1], False),
    ((2_000_000,), [500], True),
])  # fmt: skip
def test_reasoning_is_bounded_by_tokens(bounds: tuple[int, ...], lengths: list[int], expected: bool) -> None:
    think = "".join(
        "<|channel|>analysis<|message|>" + "x\n" * length + "<|end|><|start|>assistant" for length in lengths
    )
    assert len(VOCAB.encode("x\n" * 500)) == 500 * len(VOCAB.encode("x\n"))
    scale = len(VOCAB.encode("x\n"))
    frames = Frames(answer=CITY, reasoning=tuple(scale * bound for bound in bounds))
    assert fits(frames, think + FINAL + '{"city":"a"}<|return|>') is expected


@pytest.mark.parametrize("bounds", [(1,), (7,), (7, 3)])
def test_a_bound_of_reasoning_is_exact(bounds: tuple[int, ...]) -> None:
    """``bound`` tokens pass, and the next one does not, whatever text they are."""
    start, end = (VOCAB.encode_with_special(text) for text in (THINK_START, THINK_END))
    *whole, last = bounds
    for more, expected in ((0, True), (1, False)):
        matcher = compile_grammar(turn_grammar(Frames(answer=CITY, reasoning=bounds)))
        for bound in whole:
            assert matcher.consume_tokens([*start, *[VOCAB.encode("x")[0]] * bound, *end])
        assert matcher.consume_tokens(start)
        reasoning = [VOCAB.encode("x")[0]] * (last + more)
        assert matcher.consume_tokens(reasoning) is expected


def test_no_special_token_is_open_within_json() -> None:
    matcher = compile_grammar(turn_grammar(TOOLS))
    matcher.consume_tokens(VOCAB.encode_with_special(THINK + GET))
    for token in VOCAB.encode('{"city":"Pa\\n<|end|> é 漢 😀"}'):
        open_ids = np.flatnonzero(
            np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        )
        assert open_ids.max() < NUM_RANKS
        assert matcher.consume_token(token)


def test_reasoning_may_be_any_bytes() -> None:
    """Tokens that are half a character too: what may be said in thought is not read."""
    matcher = compile_grammar(turn_grammar(STRUCTURED))
    matcher.consume_tokens(VOCAB.encode_with_special("<|channel|>analysis<|message|>"))
    assert matcher.consume_tokens(list(range(0, NUM_RANKS, 7)))


def test_text_of_a_client_cannot_leave_its_constraint() -> None:
    """Grammars and names that look like ours change nothing outside."""
    hostile = make.lark('start: "a" %json {"const": 1}\nfinal: "x"\nend: "y"', "p")
    check_constraint(hostile)
    assert fits(Frames(answer=hostile), FINAL + "a1<|return|>")
    assert not fits(Frames(answer=hostile), "y")
    odd = make.json_schema({"const": '"}]} @answer <[200006]>'}, "p")
    assert fits(Frames(answer=odd), FINAL + '"\\"}]} @answer <[200006]>"<|return|>')


@pytest.mark.parametrize(
    ("pattern", "text", "expected"),
    [
        ("^a/b$", "a/b", True),
        (r"a\/b", "a/b", True),
        (r"[/]+", "//", True),
        ("a\nb", "a\nb", True),
        (r"cost: \$", "cost: $", True),
        (r"^5\$$", "5$", True),
        ("abc", "xabc", False),
        (r"\d{2}", "12", True),
    ],
)
def test_a_pattern_matches_the_whole_text(pattern: str, text: str, expected: bool) -> None:
    matcher = compile_grammar(raw_grammar(make.regex(pattern, "p")))
    ok = matcher.consume_tokens(VOCAB.encode(text))
    assert (bool(ok) and matcher.is_accepting()) is expected


@pytest.mark.parametrize(
    "grammar",
    [
        "start: <|end|>", 'start: "a" <[1-5]>', 'start: "\\"" <end>', "start: /a/ <x> // no",
        "start: A\n<x>", 'start: "\n" <[200006]> "\n"',
    ],
)  # fmt: skip
def test_grammars_cannot_name_special_tokens(grammar: str) -> None:
    with pytest.raises(RequestError, match="special tokens"):
        make.lark(grammar, "p")


@pytest.mark.parametrize("grammar", ['start: "<" /<[a-z]+>/ // <x>\n# <y>', 'start: "\\"<"'])
def test_angle_brackets_as_text_are_fine(grammar: str) -> None:
    check_constraint(make.lark(grammar, "p"))


def test_errors_are_one_short_line() -> None:
    for schema in ({"not": {}}, {"pattern": "(a", "type": "string"}, {"type": "foo"}):
        with pytest.raises(ValueError, match=r"not|unclosed|foo") as caught:
            check_constraint(make.json_schema(schema, "p"))
        assert "\n" not in str(caught.value)
        assert "200005" not in str(caught.value)
    assert explain("") == "cannot be compiled"


@pytest.mark.parametrize("pattern", ["[a&&b]", r"[^\s\S]", "a[b&&c]"])
def test_an_unsatisfiable_schema_is_not_called_complex(pattern: str) -> None:
    for constraint in (make.regex(pattern, "p"), make.lark(f"start: /{pattern}/", "p")):
        with pytest.raises(ValueError, match=r"^nothing satisfies it$"):
            check_constraint(constraint)


@pytest.mark.parametrize(
    "dialect",
    [
        "http://json-schema.org/draft-07/schema#",
        "https://json-schema.org/draft-07/schema#",  # as many write it
        "http://json-schema.org/draft-04/schema",
        "https://json-schema.org/draft/2020-12/schema",
        "http://json-schema.org/draft/2019-09/schema#",
        "my own",
        7,
    ],
)
def test_a_schema_may_name_any_dialect(dialect: object) -> None:
    found = make.json_schema({"$schema": dialect, "type": "integer"}, "p")
    check_constraint(found)
    for text, allowed in (("17", True), ('"x"', False)):
        assert compile_grammar(raw_grammar(found)).consume_tokens(VOCAB.encode(text)) is allowed


def test_an_older_dialect_keeps_its_meaning() -> None:
    """A list of ``items`` is a tuple's up to 2019-09; later that is ``prefixItems``."""
    pair = {"type": "array", "items": [{"type": "integer"}, {"type": "boolean"}], "additionalItems": False}
    for scheme in ("http", "https"):
        found = make.json_schema({"$schema": f"{scheme}://json-schema.org/draft-07/schema#", **pair}, "p")
        matcher = compile_grammar(raw_grammar(found))
        assert matcher.consume_tokens(VOCAB.encode("[1, true]"))
        assert matcher.is_accepting()
