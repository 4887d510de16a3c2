"""The words of the corpus: pools from the vocabulary, split by hash, and rules for made-up words.

Held-out words are disjoint: the hash of a word decides whether only evaluations use it.
"""

from __future__ import annotations

import functools
import random
from typing import Literal

from chorale.harmony.vocab import Vocabulary, load_vocabulary

Split = Literal["train", "eval", "hard"]


def held_out(text: str, share: int = 12) -> bool:
    """Returns whether a word is in the evaluation pool, as one in ``share`` is (FNV-1a of the text)."""
    key = 0xCBF29CE484222325
    for byte in text.encode():
        key = ((key ^ byte) * 0x100000001B3) & 0xFFFFFFFFFFFFFFFF
    return (key >> 20) % share == 0


@functools.cache
def vocabulary() -> Vocabulary:
    return load_vocabulary()


# Words that contain one of these are in no pool: a demo should not say them at random.
_UNFIT = (
    "fuck", "shit", "cunt", "nigg", "fag", "rape", "porn", "sex", "slut", "whore", "bitch", "dick", "cock", "puss",
    "anal", "anus", "tits", "boob", "nude", "naked", "milf", "nazi", "hitler", "kill", "murder", "suicid", "terror",
    "bomb", "slave", "penis", "vagin", "erot", "fetish", "orgas", "masturb", "jihad", "negro", "retard", "bastard",
    "piss", "crap", "dildo", "incest", "molest", "pedo", "escort", "hooker", "blowjob", "cum", "jerk", "dead", "die",
)  # fmt: skip


# Words that would be held out, but occur in phrasings of the training corpus: they are trained.
_TEMPLATE_WORDS = frozenset(
    """
    address best bin calculator called chem copy currency departure echo enum facts
    func honestly humidity important items kwa lau let mean nice num nung
    ond pos price prints quantity que qui repeat required response returned save
    send should ste sum tall tweet use valid venue visible year
    afternoon august celsius computes days directly dozens indicated introduce leave lisbon navigate october
    needed office records reservation river roll sends shop since sun turns values
    account against among bit budget campaign certain cut decide defined helper hit hotel lies light lowest match metric never
    package paint payment prefer produce prove quality raised rate regard remain select shipping shops stand talk taxi
    tired touch workout insured public toggle
    aide ajuda annoyed battery bike bir blender box burnt business capitale careless damaged ekk erkl
    expensive experience fast forty four frustrating git greasy happier highly import joined kan knife lei
    lousy media nada onj pasta perfectly physics podes pom pounds przedstaw quantum quotient reliable
    remarkable sais searched shower str stunning sturdy tan tent thirteen thrilled tta tun turkish ugly uti
    vars vor vous york
    allora apart bitter enterprise failure feeling groups hand heaven inverted jetzt little
    nou painter part plumber responsive rival seeds silky singer site tam tore tourist transferred
    transform trusted verdict vile warehouse writing yummy
    """.split()  # noqa: SIM905
)


def fit(word: str) -> bool:
    return not any(part in word.lower() for part in _UNFIT)


_STARTS = (*"b br c ch d dr f g gr h j k kl l m n p pr r s st t tr v w z".split(), "")  # noqa: SIM905
_VOWELS = ("a", "e", "i", "o", "u", "ai", "ei", "ou", "ia", "io", "ee")
_ENDS = ("", "", "n", "r", "l", "s", "t", "m", "nd", "rk", "x", "ng", "sh")
SUFFIXES = ("s", "ed", "ing", "ly", "er", "ness", "ful", "ish", "able", "y", "ism", "land", "ton", "ville")
LETTERS = "abcdefghijklmnopqrstuvwxyz"


def syllables(rng: random.Random) -> str:
    """Returns two or three syllables, usually several tokens."""
    syllables = [
        rng.choice(_STARTS) + rng.choice(_VOWELS) + (rng.choice(_ENDS) if rng.random() < 0.5 else "")
        for _ in range(rng.choice((2, 2, 3)))
    ]
    return "".join(syllables)


@functools.cache
def words(split: Split, title: bool = False) -> tuple[str, ...]:
    """Returns words of 3 to 12 letters that are one token after a space.

    Without a space, as in JSON, most are several tokens, which the model must learn for each word. It would be
    unfair to expect this for words that training never saw: they are in "hard" only, and "eval" has words that
    are one token in both cases.
    """
    spaced = _pool(split, title, spaced=True)
    if split != "eval":
        return spaced
    alone = set(_pool(split, title, spaced=False))
    return tuple(word for word in spaced if word in alone)


@functools.cache
def pieces(split: Split) -> tuple[str, ...]:
    """Returns lower-case words that are one token only without a space before them; none for "eval"."""
    if split == "eval":
        return words(split)
    after_space = set(words(split))
    return tuple(word for word in _pool(split, False, spaced=False) if word not in after_space)


def _pool(split: Split, title: bool, spaced: bool) -> tuple[str, ...]:
    vocab = vocabulary()
    found = []
    for token in map(vocab.token_bytes, range(199998)):
        word = token[1:] if spaced else token
        if (spaced and token[:1] != b" ") or not 3 <= len(word) <= 12:
            continue
        text = word.decode("latin-1")
        if text.isascii() and text.isalpha() and (text.istitle() if title else text.islower()):
            found.append(text)
    return tuple(
        w
        for w in found
        if fit(w) and (held_out(w.lower()) and w.lower() not in _TEMPLATE_WORDS) == (split != "train")
    )
