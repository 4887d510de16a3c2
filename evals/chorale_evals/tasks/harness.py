"""The parts of lm-evaluation-harness that grading needs: its regex filter and its exact match.

Written after the behaviour of lm_eval 0.4.13 (``filters/extraction.py``, ``api/metrics.py``).
"""

from __future__ import annotations

import re
import string
from collections.abc import Iterable
from typing import Any

from chorale_evals.tasks.patterns import everything

NO_MATCH = "[invalid]"
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def extract(pattern: Any, text: str, place: int = 0) -> str:
    """Returns the match at ``place`` of all matches; of several groups the first that is not empty."""
    found = everything(pattern, text)
    if not found:
        return NO_MATCH
    groups = found[place]
    if isinstance(groups, tuple):
        groups = next((group for group in groups if group), NO_MATCH)
    return str(groups).strip()


def exact_match(
    answer: str, reference: str, *, ignore_punctuation: bool = False, ignored: Iterable[str] = ()
) -> bool:
    """Returns whether both are equal, without case and without what matches one of ``ignored``."""
    for pattern in ignored:
        answer, reference = re.sub(pattern, "", answer), re.sub(pattern, "", reference)
    answer, reference = answer.lower(), reference.lower()
    if ignore_punctuation:
        answer, reference = answer.translate(_NO_PUNCTUATION), reference.translate(_NO_PUNCTUATION)
    return answer == reference
