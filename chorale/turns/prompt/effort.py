"""Reasoning effort: what a request names, and the line ``Reasoning: high`` of a system or developer message.

gpt-oss reads its effort in harmony's own system message, which clients cannot write; its model card asks
people to put that line into theirs. So a line that holds nothing else moves there: it sets the effort unless
a field of the request does, and is removed from its message. The last of several counts. User messages are
not searched.
"""

from __future__ import annotations

import re
from typing import cast

from chorale.errors import invalid
from chorale.harmony.messages import ReasoningEffort

# gpt-oss knows three efforts; the other names of OpenAI's enum go to the nearest.
EFFORTS: dict[str, ReasoningEffort] = {
    "none": "low",
    "minimal": "low",
    "low": "low",
    "medium": "medium",
    "high": "high",
    "xhigh": "high",
    "max": "high",
}
DEFAULT_EFFORT: ReasoningEffort = "medium"
_LINE = re.compile(
    r"^[ \t]*reasoning:[ \t]*(low|medium|high)[ \t]*\r?(?:\n|\Z)", re.IGNORECASE | re.MULTILINE
)


def reasoning_effort(value: object, param: str, default: ReasoningEffort = DEFAULT_EFFORT) -> ReasoningEffort:
    """``default``: where the request says nothing. Raises ``RequestError`` for a name not in the enum."""
    if value is None:
        return default
    if not isinstance(value, str) or value not in EFFORTS:
        raise invalid(param, f"must be one of {', '.join(EFFORTS)}")
    return EFFORTS[value]


def take_effort(text: str) -> tuple[str, ReasoningEffort | None]:
    """Return the text without its effort lines, and the effort of the last one (None without any)."""
    found = _LINE.findall(text)
    if not found:
        return text, None
    return _LINE.sub("", text).strip("\r\n"), cast(ReasoningEffort, found[-1].lower())
