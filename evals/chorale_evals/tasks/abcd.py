"""Finds the letter that answers a question with four choices, exactly as ``gpt_oss.evals`` does.

The patterns are those of ``gpt_oss/evals/abcd_grader.py`` in gpt-oss 0.0.9 (Copyright OpenAI, Apache-2.0), in
its order of precedence; any change to them would change scores.
"""

from __future__ import annotations

import re

from chorale_evals.graders.regex import compiled, first

_MARK = r"(?:\*{1,2}|_{1,2})"  # Markdown emphasis
_LETTER = r"([ABCD])"
_ALONE = r"(?<![A-Za-z0-9])"
_END = r"(?![A-Za-z0-9])"

_PATTERNS = [
    compiled(pattern, flags)
    for pattern, flags in (
        (rf"{_MARK}Answer[s]?\s*[:\-–]?{_MARK}\s*{_LETTER}\b", re.I),
        (rf"^\s*{_MARK}?Answer:?{_MARK}?\s*:?\s*{_MARK}?{_LETTER}{_MARK}?\s*", re.I | re.M),
        (rf"\bAnswer[s]?\b\s*[:\-–]?\s*\(\s*{_LETTER}\s*\)", re.I),
        (rf"\bAnswer[s]?\b\s*[:\-–]?\s*{_LETTER}\b", re.I),
        (rf"\b(?:Option|Choice)\b\s*[:\-–]?\s*{_LETTER}\b", re.I),
        (rf"\\boxed\{{[^}}]*?{_LETTER}[^}}]*\}}", 0),
        (rf"\\boxed\{{[^}}]*?\\textbf\{{[^}}]*?{_LETTER}[^}}]*\}}[^}}]*\}}", 0),
        (rf"\\boxed\{{[^}}]*?\\text\{{[^}}]*?{_LETTER}[^}}]*\}}[^}}]*\}}", 0),
        (rf"{_ALONE}[\(\[]\s*{_LETTER}\s*[\)\]]{_END}", 0),
        (rf"{_ALONE}{_MARK}{_LETTER}{_MARK}{_END}", 0),
        (rf"\\textbf\{{[^}}]*?{_LETTER}[^}}]*\}}", 0),
        (rf"{_ALONE}{_MARK}\s*{_LETTER}\)[^*_\n]+?{_MARK}{_END}", 0),
        (rf"^\s*{_MARK}?{_LETTER}{_MARK}?\s*[\.\)\-–:]?\s*.*$", re.M),
    )
]


def extract_abcd(text: str) -> str:
    """Returns the declared letter; without a declaration, the first character of the text, or ""."""
    for pattern in _PATTERNS:
        match = first(pattern, text)
        if match:
            return str(match.group(1)).upper()
    return text.removeprefix("**")[:1]
