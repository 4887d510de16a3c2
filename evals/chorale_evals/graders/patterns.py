"""Searches texts with regular expressions, from a published task or from an operator.

Some published patterns take quadratic time or worse on texts that a looping model writes, such as a hundred
thousand line ends. A search therefore ends after ``SECONDS``, which counts as "no match", and it releases the
interpreter lock. On all other texts the results equal those of the module ``re``.
"""

from __future__ import annotations

from typing import Any

import regex  # type: ignore[import-untyped]  # comes with tiktoken

SECONDS = 1.0


def compiled(pattern: str, flags: int = 0) -> Any:
    """Compiles a pattern that was written for ``re``. Raises ``ValueError`` for an invalid one."""
    try:
        return regex.compile(pattern, flags | regex.VERSION0)
    except regex.error as error:
        raise ValueError(f"invalid pattern: {error}") from None


def first(pattern: Any, text: str) -> Any | None:
    """Returns the first match, or None."""
    try:
        return pattern.search(text, timeout=SECONDS, concurrent=True)
    except TimeoutError:
        return None


def everything(pattern: Any, text: str) -> list[Any]:
    """Returns all matches, in the form of ``re.findall``."""
    try:
        found: list[Any] = pattern.findall(text, timeout=SECONDS, concurrent=True)
        return found
    except TimeoutError:
        return []
