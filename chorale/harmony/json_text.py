"""JSON that a model or a foreign server wrote: read so that every string of it can be written again."""

from __future__ import annotations

import json
from typing import Any

from chorale.harmony.bpe import replace_surrogates


def loads(text: str | bytes, *, strict: bool = True) -> Any:
    """As ``json.loads``, but half of a surrogate pair, which no UTF-8 can hold, becomes U+FFFD.

    ``strict`` False: control characters may stand in strings. Raises what that raises.
    """
    value = json.loads(text, strict=strict)
    escape = "\\u" if isinstance(text, str) else b"\\u"
    return _whole(value) if escape in text else value  # type: ignore[operator]


def _whole(value: Any) -> Any:
    if isinstance(value, str):
        return replace_surrogates(value)
    if isinstance(value, list):
        return [_whole(entry) for entry in value]
    if isinstance(value, dict):
        return {replace_surrogates(key): _whole(entry) for key, entry in value.items()}
    return value
