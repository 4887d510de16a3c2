"""Requests for a word backwards or in another case, assembled from parts. {x}: the word."""

from __future__ import annotations

from training.corpus.base import Draw

_BACK = (
    "backwards", "backwards", "backward", "in reverse", "in reverse", "reversed", "in reverse order", "from back to front", "back to front", "from the end", "from the end to the start", "from right to left", "the other way round", "the wrong way round",
    "with its letters reversed", "in reversed letters", "in reverse letters", "with the letters in reverse", "end to start", "last letter first", "starting at the end", "in backward order", "turned around", "in mirror writing",
    "flipped", "mirrored", "inverted", "from its end", "from finish to start", "from the last letter", "with the letters turned round", "the other way around",
)  # fmt: skip
_ACTS = ("write", "spell", "type", "say", "print", "read", "give me", "show me", "show", "I want", "I need", "send me", "return", "output", "let me see", "put down", "display", "repeat", "can you write", "can you spell", "could you type", "please write",
         "please spell", "please give me", "now write", "tell me", "I would like", "could you say", "would you write", "kindly spell")  # fmt: skip
_TURNS = ("reverse", "reverse", "flip", "mirror", "invert", "turn around", "turn round", "flip around", "swap round", "rewind", "switch around", "please reverse", "please flip", "please mirror", "can you reverse", "can you flip", "could you reverse", "could you mirror",
          "now reverse", "I want you to reverse", "do reverse", "help me reverse", "backwardise", "please invert", "would you flip", "kindly reverse")  # fmt: skip
_WORD = (
    "",
    "",
    "",
    "the word ",
    "the word ",
    "this word: ",
    "this: ",
    "the string ",
    "the text ",
    "this word please: ",
    "the letters of ",
    "the letters in ",
    "the characters of ",
    "the order of letters in ",
    "the following word: ",
)
_ASKED = (
    "{t} {o}{x}", "{t} {o}{x}", "{t} {o}{x}", "{t}: {x}", "{x}: {t}", "{a} {x} {b}", "{a} {x} {b}", "{a} {x} {b}", "{a} the word {x} {b}", "{a} the letters of {x} {b}", "{x} {b}", "{x} {b}", "{x}, {b}", "{x}, but {b}", "{b}: {x}", "{b}: {x}", "{b}, please: {x}",
    "the word {x} {b}", "what is {x} {b}?", "what's {x} {b}?", "what is {x} spelled {b}?", "{x} spelled {b}", "{x} written {b}", "how does {x} read {b}?", "how does {x} look {b}?", "how do you write {x} {b}?", "how is {x} spelled {b}?",
    "what do I get if I read {x} {b}?", "what does {x} give {b}?", "reverse of {x}", "the reverse of {x}", "the reversal of {x}", "what is the reverse of {x}?", "what would {x} be {b}?", "{x} -> {b}", "{x} ({b})", "{b} - {x}", "I want to see {x} {b}",
    "how would {x} be spelled {b}?", "tell me {x} {b}", "{x}: {b}", "what happens when I {t} {x}?", "the letters of {x}, {b}", "{x} {b}, please", "give the reverse of {x}", "what word is {x} {b}?", "spelling of {x} {b}?",
)  # fmt: skip
_CAPS = (
    "uppercase",
    "upper case",
    "capitals",
    "capital letters",
    "all caps",
    "caps",
    "block letters",
    "uppercase letters",
    "capital letters only",
    "big letters",
    "upper-case letters",
    "full caps",
    "block capitals",
    "upper-case",
)
_SMALL = (
    "lowercase",
    "lower case",
    "small letters",
    "lowercase letters",
    "little letters",
    "lower case letters",
    "lower-case letters",
    "no capitals",
    "all lowercase",
)
_UP_VERBS = (
    "uppercase",
    "capitalise",
    "capitalize",
    "upper-case",
    "shout",
    "shout out",
    "please uppercase",
    "can you uppercase",
    "could you capitalise",
    "fully capitalize",
    "yell",
    "please capitalize",
    "raise the case of",
)
_LOW_VERBS = (
    "lowercase",
    "lower-case",
    "decapitalise",
    "please lowercase",
    "can you lowercase",
    "could you lowercase",
    "lower the case of",
    "uncapitalize",
)
_CASED = (
    "{v} {x}", "{v} {x}", "{v} {o}{x}", "{v}: {x}", "{v} this: {x}", "{x} in {c}", "{x} in {c}", "{c}: {x}", "{c}: {x}", "{c} for {x}", "{c} of {x}", "to {c}: {x}", "{a} {x} in {c}", "{a} {x} in {c}", "{a} the word {x} in {c}", "turn {x} into {c}", "make {x} {c}",
    "convert {x} to {c}", "change {x} to {c}", "put {x} in {c}", "{x} to {c}", "{x} -> {c}", "{x}, in {c} please", "{x} in {c}, please", "what is {x} in {c}?", "how does {x} look in {c}?", "set {x} in {c}", "{c}, please: {x}", "I need {x} in {c}", "{x} ({c})",
    "only {c}: {x}", "rewrite {x} in {c}", "in {c}: {x}", "make this {c}: {x}", "transform {x} into {c}", "{x} with {c}", "use {c} for {x}", "bring {x} into {c}",
)  # fmt: skip


def _cased_at_random(draw: Draw, text: str) -> str:
    """Returns the request as typed: mostly with a capital at the start, sometimes polite."""
    if draw.chance(0.12) and text[-1] not in "?":
        text += draw.pick((" please", ", please", " for me", ", thanks"))
    return text if draw.chance(0.45) else text[0].upper() + text[1:]


def reversed_order(draw: Draw) -> str:
    text = draw.phrase(_ASKED).format(
        x="{x}", b=draw.phrase(_BACK), a=draw.phrase(_ACTS), t=draw.phrase(_TURNS), o=draw.phrase(_WORD)
    )
    return _cased_at_random(draw, text) if text[0] != "{" else text


def cased(draw: Draw, *, upper: bool) -> str:
    words, verbs = (_CAPS, _UP_VERBS) if upper else (_SMALL, _LOW_VERBS)
    text = draw.phrase(_CASED).format(
        x="{x}", c=draw.phrase(words), v=draw.phrase(verbs), a=draw.phrase(_ACTS), o=draw.phrase(_WORD[:10])
    )
    if text[0] == "{":
        return text
    if upper and draw.chance(0.1):
        return text.split("{")[0].upper() + "{" + text.split("{", 1)[1]
    return _cased_at_random(draw, text)
