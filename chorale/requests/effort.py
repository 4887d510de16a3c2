"""Reasoning effort: its names in requests, and the line ``Reasoning: high`` of system or developer messages.

gpt-oss reads the effort in harmony's system message, which clients cannot write; its model card recommends
that line in theirs. A line with no other text is therefore moved: it sets the effort unless a field of the
request does, and is removed from its message. The last of several counts. User messages are not searched.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import cast

from chorale.config.engine import EFFORTS
from chorale.errors import invalid
from chorale.harmony.messages import ReasoningEffort

DEFAULT_EFFORT: ReasoningEffort = "medium"
_LINE = re.compile(
    r"^[ \t]*reasoning:[ \t]*(low|medium|high)[ \t]*\r?(?:\n|\Z)", re.IGNORECASE | re.MULTILINE
)


def reasoning_effort(
    value: object,
    param: str,
    default: ReasoningEffort = DEFAULT_EFFORT,
    mapped: Mapping[str, str] = MappingProxyType({}),
) -> ReasoningEffort:
    """``default``: used if the request has none. ``mapped``: --reasoning-effort-map, for requested efforts.

    Raises ``RequestError`` for a name not in the enum.
    """
    if value is None:
        return default
    if not isinstance(value, str) or value not in EFFORTS:
        raise invalid(param, f"must be one of {', '.join(EFFORTS)}")
    return EFFORTS[mapped.get(value, value)]


def take_effort(text: str) -> tuple[str, ReasoningEffort | None]:
    """Returns the text without its effort lines, and the last effort (or None)."""
    found = _LINE.findall(text)
    if not found:
        return text, None
    return _LINE.sub("", text).strip("\r\n"), cast(ReasoningEffort, found[-1].lower())
