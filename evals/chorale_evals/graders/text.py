"""Shared functions that read answers: remove decoration, and find an answer that a text marks as final.

All patterns have bounded repetitions and run over bounded text, so no answer can make them slow.
"""

from __future__ import annotations

import re

MAX_CHARS = 100_000  # only so many characters at the end of an answer are read
_PLAIN = str.maketrans(
    dict.fromkeys("−﹣－‒–‐‑", "-")
    | dict.fromkeys("“”„‟«»", '"')
    | dict.fromkeys("‘’‚‛", "'")
    | dict.fromkeys("\u200b\u200c\u200d\u2060\ufeff\u00ad", "")
    | dict.fromkeys("\u00a0\u2009\u202f", " ")
)
# A label ends with "is", a colon, "=" or a line end. "answers" and "answer to the question" are no labels.
_LABEL = re.compile(
    r"(?:\b(?:answer|ans|solution)\b[*_\"')\]}]{0,4}[ \t]{0,4}"
    r"(?:(?:would|should|must|will)[ \t]be\b|\bis\b|[:=]|-[ \t]|(?=\n))|^[ \t]{0,4}####|\bA:(?=[ \t]))"
    r"[*_\"':= \t]{0,8}",
    re.IGNORECASE | re.MULTILINE,
)
_PAIRS = ("**", "__", "```", "`", "$$", "$", '"', "'", "*", "_")
_WRAPPERS = [*((mark, mark) for mark in _PAIRS), ("\\(", "\\)"), ("\\[", "\\]")]
_COMMAND = re.compile(
    r"\\(?:boxed|fbox|text|textbf|mathrm|mathbf|mathit|textit|mbox)\s{0,3}\{([^{}]{0,300})\}"
)
_FENCE = re.compile(r"[ \t]{0,3}(`{3,20}|~{3,20})([^`]{0,200})$")


def plain(text: str) -> str:
    """Returns the end of a text, with ASCII quotes, minus signs and spaces."""
    return text[-MAX_CHARS:].translate(_PLAIN)


def boxed(text: str) -> str | None:
    """Returns the content of the last complete ``\\boxed{...}``."""
    end = len(text)
    for _ in range(50):
        start = text.rfind("\\boxed{", 0, end)
        if start < 0:
            break
        opening, depth = start + 6, 0
        for index in range(opening, min(len(text), opening + 4000)):
            depth += (text[index] == "{") - (text[index] == "}")
            if depth == 0:
                return text[opening + 1 : index]
        end = start
    return None


def labelled(text: str) -> str | None:
    """Returns the rest of the paragraph after the last label ("The answer is", "Answer:", "####")."""
    found = None
    for found in _LABEL.finditer(text):  # noqa: B007 (the last match)
        pass
    rest = text[found.end() :].lstrip("\n \t") if found else ""
    return rest.partition("\n\n")[0][:2000] or None


def bare(text: str) -> str:
    """Returns a short answer without markup, quotes and final full stop, its spaces collapsed."""
    text = " ".join(_COMMAND.sub(r"\1", text).split())
    before = None
    while text != before and text:
        before = text
        for left, right in _WRAPPERS:
            if len(text) > len(left) + len(right) and text.startswith(left) and text.endswith(right):
                inner = text[len(left) : -len(right)]
                text = inner.strip() if left not in inner else text
        if text.endswith(".") and not text.endswith(".."):
            text = text[:-1].rstrip()
    return text


def fences(text: str) -> list[str]:
    """Returns the content of each fenced block that is closed."""
    found: list[str] = []
    opened, lines = "", list[str]()
    for line in text.splitlines():
        mark = _FENCE.match(line)
        if not opened:
            if mark:
                opened, lines = mark[1], []
        elif mark and mark[1].startswith(opened) and not mark[2].strip():
            found.append("\n".join(lines))
            opened = ""
        else:
            lines.append(line)
    return found
