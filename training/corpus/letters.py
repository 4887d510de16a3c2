"""Words letter by letter: reversed, spelt, in capitals, counted. The analysis numbers the letters first."""

from __future__ import annotations

from training.corpus.base import Dialogue, Draw
from training.corpus.calculation import worked
from training.corpus.letter_phrases import cased, reversed_order
from training.corpus.words import words

MAX_LETTERS = 10
_REVERSE = (
    "Reverse the word {x}", "Reverse the word {x}.", "Spell {x} backwards.", "Write {x} backwards", "What is {x} spelled backwards?",
    "{x} backwards", "Reverse {x}", "Reverse {x}.", "Reverse the string {x}", "Reverse the letters of {x}.", "What is {x} backwards?",
    "Say {x} backwards", "Please reverse the word {x}", "reverse {x}", "Give me {x} in reverse.", "Turn the word {x} around.",
    "Mirror the word {x}", "How is {x} written backwards?", "Can you spell {x} in reverse?", "Can you reverse {x}?", "How do you spell {x} backwards?",
    "Could you reverse the word {x}?", "Write the word {x} in reverse.", "What does {x} read backwards?",
)  # fmt: skip
_SPELL = (
    "Spell {x}", "Spell the word {x}.", "How do you spell {x}?", "Spell {x} for me.", "Spell out {x}", "What are the letters of {x}?",
    "List the letters of {x}", "Split {x} into letters.", "Spell {x} letter by letter.", "How is {x} spelled?", "Please spell {x}.",
    "Give me the letters in {x}.", "Spell {x} with hyphens", "Spell {x} with a dash between letters", "{x} letter by letter", "Letters of {x}, joined by dashes", "{x}, spelled out",
    "Please spell out the word {x}", "spell: {x}", "Say the letters of {x}", "Type {x} letter for letter", "Put dashes between the letters of {x}", "Could you spell {x}?", "Which letters does {x} have?",
)  # fmt: skip
_UPPER = (
    "Uppercase {x}", "Write {x} in capital letters.", "Make {x} uppercase", "Convert {x} to uppercase.", "{x} in capitals", "uppercase: {x}",
    "{x} in uppercase", "Put {x} in upper case.", "Turn {x} into capital letters", "Write {x} in all caps.", "What is {x} in uppercase?",
    "Please write {x} in uppercase", "Capital letters, please: {x}", "Uppercase this: {x}", "Change {x} to upper case", "Uppercase the word {x}.",
    "Can you write {x} in capitals?", "Show {x} in uppercase letters.", "Could you uppercase {x}?",
)  # fmt: skip
_LOWER = (
    "Lowercase {x}", "Write {x} in lowercase.", "Make {x} lowercase", "Convert {x} to lowercase.", "{x} in small letters", "lowercase: {x}",
    "Put {x} in lower case.", "Turn {x} into small letters", "What is {x} in lowercase?", "Change {x} to lower case.", "Lowercase this: {x}",
    "Can you write {x} in small letters?", "Show {x} in lowercase letters.",
)  # fmt: skip
_LENGTH = (
    "How many letters are in {x}?", "How many letters does {x} have?", "Count the letters in {x}.", "How long is the word {x}?",
    "Number of letters in {x}", "What is the length of {x}?", "how many letters in {x}", "Count the characters in {x}", "How many characters are in {x}?",
    "{x}: how many letters?", "How many letters make up {x}?", "The word {x} has how many letters?", "count letters: {x}", "letter count of {x}", "how long is {x}?", "Length of {x}?", "How many letters do I need for {x}?",
    "Can you count the letters of {x}?", "letters in {x}?", "What length has {x}?", "How many letters long is {x}?", "Tell me the number of letters of {x}", "How many characters has {x}?", "What is the number of letters in {x}?",
)  # fmt: skip
_ONE_LETTER = (
    "How many {l}'s are in {x}?", "How many {l}s are in {x}?", "How often does {l} occur in {x}?", "Count the letter {l} in {x}.",
    "How many times does the letter {l} appear in {x}?", "How many {l} are in {x}?", "how many {l}'s in {x}", "Number of {l}'s in {x}?",
    "{x}: how many {l}?", "In {x}, how many {l}'s?", "Does {x} have {l}, and how often?", "How many {l} does {x} contain?", "Find all {l} in {x} and count them", "Count {l} in {x}", "Count the {l} of {x}", "{l} in {x}: how many?",
    "How often do you see {l} in {x}?", "Count how often {l} is in {x}", "I need the count of {l} in {x}", "How many times is {l} in {x}?", "How many letters {l} does {x} have?", "Count the {l}'s in {x}", "How often is the letter {l} in {x}?",
    "Tell me how many {l}'s {x} has.",
)  # fmt: skip
_WHICH = (
    "What is the {w} letter of {x}?", "Which letter is {w} in {x}?", "{w} letter of {x}", "The {w} letter of {x}?", "Give me the {w} letter of {x}.",
    "What's the {w} letter in {x}?", "Tell me the {w} letter of {x}", "Which is the {w} letter of {x}?", "Name the {w} letter of {x}.",
    "With which letter does {x} start?", "Say the {w} letter of {x}.", "Can you name the {w} letter of {x}?",
)  # fmt: skip
_ORDINALS = ("first", "second", "third", "fourth", "fifth")


def _word(draw: Draw, longest: int = MAX_LETTERS) -> str:
    """Returns a word, mostly one of the most frequent ones (which have the lowest token ids)."""
    while True:
        pool = words(draw.split)
        word = str(draw.pick(pool[: len(pool) // 8])) if draw.chance(0.55) else draw.word()
        if len(word) <= longest and word.isascii() and word.isalpha():
            return word


def _shown(draw: Draw, word: str) -> str:
    return str(draw.pick(("{0}", "{0}", '"{0}"', "'{0}'"))).format(word)


def numbered(word: str) -> str:
    return " ".join(f"{at}{letter}" for at, letter in enumerate(word, 1))


def _case(draw: Draw, phrasings: tuple[str, ...], aim: str, *, upper: bool) -> Dialogue:
    given = [_word(draw, 8) for _ in range(draw.pick((1, 1, 1, 2, 2, 3)))]
    if upper:
        given = [word.capitalize() for word in given] if draw.chance(0.2) else given
    else:
        given = [word.upper() if draw.chance(0.75) else word.capitalize() for word in given]
    wanted = [word.upper() if upper else word.lower() for word in given]
    text = " ".join(given)
    phrasing = cased(draw, upper=upper) if draw.chance(0.55) else draw.phrase(phrasings)
    dialogue = worked(
        draw,
        "letters",
        phrasing.format(x=_shown(draw, text)),
        f"{'; '.join(map(numbered, given))}.",
        " ".join(wanted),
        aim,
    )
    dialogue.letters = tuple(wanted)
    return dialogue


def change(draw: Draw) -> Dialogue:
    """Asks for a word backwards or in another case."""
    kind = draw.integer(0, 9)
    if kind < 4:
        word = _word(draw)
        word = word.capitalize() if draw.chance(0.2) else word
        back = word[::-1]
        listed = " ".join(f"{at}{word[at - 1]}" for at in range(len(word), 0, -1))
        phrasing = reversed_order(draw) if draw.chance(0.6) else draw.phrase(_REVERSE)
        question = phrasing.format(x=_shown(draw, word))
        dialogue = worked(
            draw,
            "letters",
            question,
            f"{numbered(word)}. Backwards: {listed}.",
            back,
            "The user wants a word backwards.",
        )
        dialogue.letters = (back,)
        return dialogue
    if kind < 7:
        return _case(draw, _UPPER, "The user wants capital letters.", upper=True)
    if kind < 8:
        return _case(draw, _LOWER, "The user wants small letters.", upper=False)
    word = _word(draw)
    question = draw.phrase(_SPELL).format(x=_shown(draw, word))
    return worked(
        draw, "letters", question, f"{numbered(word)}.", "-".join(word), "The user wants the letters."
    )


def count(draw: Draw) -> Dialogue:
    """Asks for the number of letters, the occurrences of a letter, or the letter at a position."""
    word, kind = _word(draw), draw.integer(0, 3)
    shown = _shown(draw, word)
    if kind == 0:
        question = draw.phrase(_LENGTH).format(x=shown)
        return worked(
            draw,
            "letter_count",
            question,
            f"{numbered(word)}.",
            f"It has {len(word)} letters.",
            "I count the letters.",
        )
    if kind == 1:
        at = draw.integer(0, min(len(word), 5) - 1)
        which, letter = (_ORDINALS[at], word[at]) if draw.chance(0.7) else ("last", word[-1])
        question = draw.phrase(_WHICH[:9] + _WHICH[10:]).format(x=shown, w=which)
        return worked(
            draw,
            "letter_count",
            question[0].upper() + question[1:],
            f"{numbered(word)}. The {which} is {letter}.",
            letter,
            "I number the letters.",
        )
    letter = draw.pick(word) if draw.chance(0.85) else draw.pick("aeinorst")
    places = [str(at) for at, one in enumerate(word, 1) if one == letter]
    found = ", ".join(f"{number} at {at}" for number, at in enumerate(places, 1)) or "none"
    times = f"{len(places)} time{'' if len(places) == 1 else 's'}"
    question = draw.phrase(_ONE_LETTER).format(
        x=shown, l=draw.pick((letter, letter, letter.upper(), f'"{letter}"'))
    )
    working = f"{numbered(word)}. {letter}: {found}. So {len(places)}."
    return worked(
        draw,
        "letter_count",
        question,
        working,
        f"The letter {letter} occurs {times}.",
        f"I look for {letter}.",
    )
