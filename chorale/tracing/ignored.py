"""The fields of a request that no endpoint knows: ignored and named in the answer, or refused.

vLLM ignores them, and clients of many servers rely on it. ``--unknown-fields`` decides. Fields that are
refused by name are errors in either case. All code that finds an unknown field calls ``unknown_field``.
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Iterable
from urllib.parse import quote

from chorale.errors import RequestError
from chorale.tracing.context import CURRENT, RequestContext

logger = logging.getLogger(__name__)

HEADER = "x-chorale-ignored-fields"
_SHOWN = 96  # characters shown of a field's name
_HEADER_BYTES = 1024  # proxies limit the whole head to a few kB
_MOST_LOGGED = 1000
# Names of the same field in different APIs.
_SAME = (
    ("max_output_tokens", "max_completion_tokens", "max_tokens"),
    ("input", "messages", "prompt"),
    ("text", "response_format"),
)
_logged: set[str] = set()  # names that this process has logged


def unknown_field(name: str, known: Iterable[str] = ()) -> None:
    """Ignores the field for the current request. Raises ``RequestError`` if such fields are refused.

    ``name``: its path; ``known``: valid names, for a suggestion.
    """
    shown = name[:_SHOWN]
    context = CURRENT.get()
    if context is None or context.ignored is None:
        raise RequestError(
            f"unknown parameter '{shown}'{_hint(shown, known)}", param=shown, code="unknown_parameter"
        )
    if context.ignored.add(shown) and shown not in _logged and len(_logged) < _MOST_LOGGED:
        _logged.add(shown)
        logger.warning(
            "unknown parameter %s is ignored%s (logged once; --unknown-fields refuse makes it an error)",
            ascii(shown),
            _hint(shown, known),
        )


def _hint(name: str, known: Iterable[str]) -> str:
    known = sorted(known)
    same = [other for names in _SAME if name in names for other in names if other in known]
    near = same or difflib.get_close_matches(name, known, n=1)
    return f"; did you mean '{near[0]}'?" if near else ""


def header(context: RequestContext | None) -> str:
    """Returns the value of ``HEADER``: percent-encoded names, and "..." if not all have room; or ""."""
    value = ""
    for name in () if context is None or context.ignored is None else context.ignored.names:
        value += (", " if value else "") + quote(name.encode("utf-8", "replace"), safe=".[]")
        if len(value) > _HEADER_BYTES:
            return value[:_HEADER_BYTES].rpartition(", ")[0] + ", ..."
    return value


def warnings(value: str) -> list[str]:
    """Returns the header's content as warnings, for answers without headers."""
    return [f"unknown parameter '{name}' was ignored" for name in value.split(", ") if name]
