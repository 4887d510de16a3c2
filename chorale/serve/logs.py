"""Log records of one line each: a client's bytes cannot forge a line or move the cursor."""

from __future__ import annotations

import logging
import sys

# C0 and C1 controls, DEL, and Unicode's line and paragraph separators.
_ESCAPES = {
    code: f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"
    for code in (*range(32), *range(127, 160), 0x2028, 0x2029)
}


class OneLineFormatter(logging.Formatter):
    """Escapes control characters in messages. Tracebacks keep their lines."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = record.message.translate(_ESCAPES)
        return super().formatMessage(record)


# They log each request at INFO: searches, pages, MCP calls, downloads.
CHATTY = ("httpx2", "httpcore2", "httpx", "httpcore", "huggingface_hub", "urllib3", "filelock", "websockets")


def configure_logging(level: str, form: str) -> None:
    """Configures root logging on stderr, with a %-style format."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(OneLineFormatter(form))
    logging.basicConfig(level=level.upper(), handlers=[handler])
    quiet = logging.NOTSET if level.lower() == "debug" else logging.WARNING
    for name in CHATTY:
        logging.getLogger(name).setLevel(quiet)
