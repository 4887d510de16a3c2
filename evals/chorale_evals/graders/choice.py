"""``choice``: the answer is the letter of one choice."""

from __future__ import annotations

import re
from collections.abc import Sequence

from chorale_evals.graders.text import bare, boxed, labelled, plain, tail
from chorale_evals.graders.verdict import Verdict

_MAX_LINES = 200  # at each end of a long answer
LETTERS = "ABCDEFGHIJ"
_CYRILLIC = str.maketrans("АВСЕНавсе", "ABCEHabce")
# After a letter: a second one makes the answer ambiguous.
_SECOND = re.compile(
    r"[\s*_()\]}.\"']{0,4}(?:,|/|&|\+|\bor\b|\band\b|\bnor\b)\s{0,2}"
    r"(?:also |maybe |possibly |perhaps |option )?"
    r"[\s*_(\[{\"']{0,4}([A-Za-z])(?![\w'])"
)
_ABOUT = re.compile(r"\s{0,2}(?:is|are|was|isn't|seems|looks)\b")
_CORRECT = re.compile(
    r"\s{0,2}(?:is|seems|looks)\s(?:therefore\s|thus\s|clearly\s)?(?:the\s)?(?:most\s)?"
    r"(?:correct|right|best|answer|true|accurate)\b"
)
_INCORRECT = re.compile(r"\s{0,2}(?:is|are)\s(?:not\b|wrong|incorrect|false)|\s{0,2}isn't")
_LETTER = re.compile(r"\s[B-HJ](?![\w'])")


def grade(text: str, target: str, *, choices: Sequence[str] = (), letters: str = LETTERS) -> Verdict:
    """Compares letters. ``choices``: their contents, if an answer may be the content of a choice instead."""
    if choices:
        letters = letters[: len(choices)]
    found = read(text, letters, choices)
    wanted = bare(plain(target)).strip("()").upper()
    if found is None:
        return Verdict(False, None, "no choice that stands as the answer")
    return Verdict(found == wanted, found, f"{'equals' if found == wanted else 'differs from'} {wanted}")


def read(text: str, letters: str = LETTERS, choices: Sequence[str] = ()) -> str | None:
    """Returns the letter that an answer gives, None if it gives none or more than one."""
    text = plain(tail(text)).translate(_CYRILLIC)
    if (inside := boxed(text)) is not None and (found := _head(inside, letters, choices)):
        return found or None
    if (rest := labelled(text)) is not None:
        found = _head(rest.partition("\n")[0], letters, choices)
        if found is not None:
            return found or None
    for reader in (_whole, _said, _bold, _lines, _last):
        found = reader(text, letters, choices)
        if found is not None:
            return found or None
    return None


def _whole(text: str, letters: str, choices: Sequence[str]) -> str | None:
    return _head(text.strip(), letters, choices) if len(text.strip().splitlines()) == 1 else None


def _head(text: str, letters: str, choices: Sequence[str]) -> str | None:
    """Returns the letter at the beginning, "" if it is ambiguous, None if there is none."""
    text = re.sub(r"\\(?:text|mathrm|mathbf|textbf)\s{0,3}\{([^{}]{0,200})\}", r"\1", text.strip())
    if (index := _content(text, choices)) is not None:
        return letters[index]
    found = re.match(
        rf"[\s*_`\"'$(\[{{-]{{0,6}}(?:(?:most likely |probably |clearly |definitely )?"
        rf"(?:option|choice|answer|letter)[:\s]{{0,3}})?(?P<open>[*_`\"'$(\[{{]{{0,4}})"
        rf"(?P<letter>[{letters}{letters.lower()}])(?P<close>[*_`\"'$)\]}}]{{0,4}})(?P<next>.?)",
        text,
        re.IGNORECASE | re.DOTALL,
    )
    if found is None or not _stands(text, found):
        return None
    letter = found["letter"].upper()
    second = _SECOND.match(text, found.end("letter"))
    if second and second.group(1).upper() in letters and second.group(1).upper() != letter:
        return ""
    rest = text[found.end("close") :].lstrip(" .):-*_")
    other = _content(rest.partition("\n")[0], choices)
    if other is not None and letters[other] != letter:
        return ""
    said = text[found.end("close") :]
    if _ABOUT.match(said):
        return letter if _CORRECT.match(said) else "" if _INCORRECT.match(said) else None
    if _LETTER.match(said):
        return ""
    return letter


def _stands(text: str, found: re.Match[str]) -> bool:
    """Returns whether a letter is not a word ("A", "I") or the beginning of one."""
    following, enclosed = found["next"], bool(found["close"].strip("*_`\"'$ "))
    if not enclosed and (following.isalnum() or following in tuple("'_^+#")):
        return False
    rest = text[found.end("close") :]
    bare_letter = not rest.strip() or rest[:1] in tuple(".):,;\n") or rest[:2] in (" -", " :", " —")
    if found["letter"].islower() and not enclosed:
        return bare_letter
    if found["letter"] in ("A", "I") and not enclosed:
        return bare_letter or bool(re.match(r"\s(?:is|because|since|as|or|and|\(|[A-Z])", rest))
    return True


def _content(text: str, choices: Sequence[str]) -> int | None:
    """Returns the index of the only choice whose content is the text."""
    said = bare(text).casefold()
    found = [index for index, one in enumerate(choices) if bare(plain(one)).casefold() == said]
    return found[0] if said and len(found) == 1 else None


def _said(text: str, letters: str, _: Sequence[str]) -> str | None:
    """Returns the letter that a sentence names as correct or as chosen; "" if sentences name several."""
    mark, named = r"[*_\"'(\[{]{0,4}", rf"([{letters}])[*_\"')\]}}]{{0,4}}"
    patterns = (
        r"(?<!not )(?<!n't )(?<!never )\b(?:choose|chose|pick|select|go with|going with|choosing)\s"
        rf"(?:option|choice|answer)?\s?{mark}{named}(?![\w'])(?!\s[a-z])",
        rf"\b(?:correct|right|best)\s(?:option|choice|letter|one)\s(?:is|would be)[:\s]{{1,3}}"
        rf"(?:option\s|choice\s)?{mark}{named}(?![\w'])(?!\s[a-z]{{3,}})",
        rf"(?:\b(?:option|choice|statement|answer)\s|(?<![\w'])){mark}{named}\s"
        r"(?:is|must be|would be|seems|looks)\s(?:therefore\s|thus\s|clearly\s)?(?:the\s)?(?:most\s)?"
        r"(?:correct|right|best|answer|true|accurate)\b",
    )
    found = [letter for pattern in patterns for letter in re.findall(pattern, text)]
    return (found[0] if len(set(found)) == 1 else "") if found else None


def _bold(text: str, letters: str, choices: Sequence[str]) -> str | None:
    found = [_head(inside, letters, choices) for inside in re.findall(r"\*\*([^*\n]{1,200})\*\*", text)]
    named = {letter for letter in found if letter}
    return (named.pop() if len(named) == 1 else "") if named else None


def _last(text: str, letters: str, _: Sequence[str]) -> str | None:
    """Returns the letter at the end of the last line, after words such as "it is" or "probably"."""
    line = text.strip().rpartition("\n")[2][-400:]
    found = re.search(
        r"\b(?:it's|it is|that's|that is|must be|would be|should be|definitely|probably|certainly|clearly"
        r"|so|thus|therefore|hence|guess|say)[,:]?\s(?:is\s)?(?:option\s|choice\s)?"
        rf"[*_(\[]{{0,3}}([{letters}])[*_)\].!]{{0,4}}$",
        line,
        re.IGNORECASE,
    )
    return found.group(1).upper() if found and found.group(1).isupper() else None


def _lines(text: str, letters: str, choices: Sequence[str]) -> str | None:
    """Returns the letter of the last or first line, if no other line begins with another letter."""
    lines = [line for line in text.splitlines() if line.strip()]
    lines = lines if len(lines) <= 2 * _MAX_LINES else lines[:_MAX_LINES] + lines[-_MAX_LINES:]
    heads = {index: letter for index, line in enumerate(lines) if (letter := _head(line, letters, choices))}
    alone = [letter for index, letter in heads.items() if len(bare(lines[index]).strip("().")) == 1]
    if alone and heads.get(len(lines) - 1) == alone[-1]:
        return alone[-1]
    if len(set(heads.values())) != 1:
        return "" if heads else None
    return next(iter(heads.values())) if {0, len(lines) - 1} & heads.keys() else None
