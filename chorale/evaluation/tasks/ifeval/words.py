"""Words as NLTK's ``word_tokenize`` finds them: lm-evaluation-harness counts words in capitals with it.

The substitutions are those of ``NLTKWordTokenizer`` in NLTK 3.10.4 (Apache-2.0), in its order.
"""

from __future__ import annotations

import re

from chorale.evaluation.tasks.ifeval.punkt import Parameters, split_sentences
from chorale.evaluation.tasks.patterns import compiled

_STARTING_QUOTES = (
    (r"([«“‘„]|[`]+)", r" \1 "),
    (r"^\"", r"``"),
    (r"(``)", r" \1 "),
    (r"([ \(\[{<])(\"|\'{2})", r"\1 `` "),
    (r"(?i)(?<!\w)(\')(?!(?:re|ve|ll|m|t|s|d|n)\b)(?=\w)", r"\1 "),
)
_PUNCTUATION = (
    (r"([^\.])(\.)([\]\)}>\"'»”’ ]*+)\s*$", r"\1 \2 \3 "),
    (r"([:,])([^\d])", r" \1 \2"),
    (r"([:,])$", r" \1 "),
    (r"\.{2,}", r" \g<0> "),
    (r"[;@#$%&]", r" \g<0> "),
    (r"[\u2012-\u2015]", r" \g<0> "),
    (r"([^\.])(\.)([\]\)}>\"']*)\s*$", r"\1 \2\3 "),
    (r"[?!]", r" \g<0> "),
    (r"([^'])' ", r"\1 ' "),
    (r"[*]", r" \g<0> "),
    (r"[\]\[\(\)\{\}\<\>]", r" \g<0> "),
    (r"--", r" -- "),
)
_ENDING_QUOTES = (
    (r"([»”’])", r" \1 "),
    (r"''", " '' "),
    (r'"', " '' "),
    (r"\s+", " "),
    (r"([^' ])('[sS]|'[mM]|'[dD]|') ", r"\1 \2 "),
    (r"([^' ])('ll|'LL|'re|'RE|'ve|'VE|n't|N'T) ", r"\1 \2 "),
)
_CONTRACTIONS = (
    *(r"\b(can)(not)\b", r"\b(d)('ye)\b", r"\b(gim)(me)\b", r"\b(gon)(na)\b", r"\b(got)(ta)\b"),
    *(r"\b(lem)(me)\b", r"\b(more)('n)\b", r"\b(wan)(na)(?=\s)", r" ('t)(is)\b", r" ('t)(was)\b"),
)
_BEFORE = [(compiled(pattern), new) for pattern, new in (*_STARTING_QUOTES, *_PUNCTUATION)]
_AFTER = [(compiled(pattern), new) for pattern, new in _ENDING_QUOTES] + [
    (compiled(pattern, re.IGNORECASE), r" \1 \2 ") for pattern in _CONTRACTIONS
]
_WORD = compiled(r"\w+")


def count_words(text: str) -> int:
    """Returns the number of runs of letters, digits and underscores."""
    return sum(1 for _ in _WORD.finditer(text))


def tokens(text: str, parameters: Parameters) -> list[str]:
    """Returns words and punctuation, sentence by sentence."""
    return [token for sentence in split_sentences(text, parameters) for token in _tokens(sentence)]


def _tokens(text: str) -> list[str]:
    for pattern, new in _BEFORE:
        text = pattern.sub(new, text)
    text = f" {text} "
    for pattern, new in _AFTER:
        text = pattern.sub(new, text)
    return text.split()
