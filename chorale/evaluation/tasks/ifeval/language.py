"""The language of a text, by langdetect, which lm-evaluation-harness uses too.

langdetect draws random numbers, so near a tie two calls may differ. Here the seed is fixed; the harness sets
none.
"""

from __future__ import annotations

import threading

from chorale.errors import ConfigError, install_hint

_LOCK = threading.Lock()  # its profiles are loaded on first use, without a lock of their own


def require() -> None:
    """Raises ``ConfigError`` if langdetect is not installed."""
    try:
        import langdetect  # noqa: F401
    except ImportError:
        raise ConfigError(f"ifeval needs langdetect: {install_hint('eval')}") from None


def is_in(text: str, code: str) -> bool:
    """Returns whether the text is in the language; True if it has no features of any, as in the harness."""
    import langdetect

    with _LOCK:
        langdetect.DetectorFactory.seed = 0
        try:
            return bool(langdetect.detect(text) == code)
        except langdetect.LangDetectException:
            return True
