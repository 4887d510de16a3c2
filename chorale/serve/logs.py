"""Logging with one line per record, as text or JSON. Escapes text from clients, which cannot forge a line."""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import json
import logging
import os
import select
import sys
import threading
import time
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Literal

import msgspec

from chorale.config.engine import ServerConfig
from chorale.tracing.context import CURRENT

# C0 and C1 controls, DEL, and Unicode's line and paragraph separators.
_ESCAPES = {
    code: f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"
    for code in (*range(32), *range(127, 160), 0x2028, 0x2029)
}
# Libraries that log each of their HTTP requests at INFO.
CHATTY = ("httpx2", "httpcore2", "httpx", "httpcore", "huggingface_hub", "urllib3", "filelock", "websockets")
EXPORTER = "opentelemetry."  # prefix of loggers that repeat an error with every batch of spans
EXPORTER_SECONDS = 60.0  # least interval of the same message


class LogOptions(msgspec.Struct, frozen=True):
    """Logging options of a process. ``lock``: path of a file that processes lock while writing a line."""

    level: str = "info"
    format: Literal["text", "json"] = "text"
    lock: str = ""

    @classmethod
    def of(cls, server: ServerConfig, lock: str = "") -> LogOptions:
        return cls(server.log_level, server.log_format, lock)


class OneLineFormatter(logging.Formatter):
    """Escapes control characters in messages. Tracebacks keep their line breaks."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = record.message.translate(_ESCAPES)
        return super().formatMessage(record)


class JsonFormatter(logging.Formatter):
    """Formats a record as a JSON object. The attribute ``fields`` of a record adds members."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        at = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
        line: dict[str, Any] = {
            "timestamp": at.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            "process": self._process,
            "pid": record.process,
        }
        if (context := CURRENT.get()) is not None:
            line["request_id"] = context.request_id
            if context.span is not None:
                line |= {"trace_id": context.span.trace_id, "span_id": context.span.span_id}
        line |= getattr(record, "fields", {})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        if record.stack_info:
            line["stack"] = self.formatStack(record.stack_info)
        return json.dumps(line, ensure_ascii=True, default=str, separators=(",", ":"))


class LineHandler(logging.Handler):
    """Writes each record to stderr, without buffering. The lock file keeps lines of several processes apart:
    a pipe accepts long lines only in pieces."""

    def __init__(self, options: LogOptions) -> None:
        super().__init__()
        self.options = options
        self._lock_file: int | None = None
        if options.lock:
            self.use_lock(options.lock)

    def use_lock(self, path: str) -> None:
        self.options = msgspec.structs.replace(self.options, lock=path)
        with contextlib.suppress(OSError):  # without the lock, only lines longer than 4 kB can be mixed up
            self._lock_file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            data = f"{self.format(record)}\n".encode("ascii", "backslashreplace")
            with self._locked():
                _write(sys.stderr.fileno(), data)
        except OSError:
            pass  # stderr is closed, so the error cannot be logged
        except Exception:
            self.handleError(record)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        if self._lock_file is None:
            yield
            return
        fcntl.flock(self._lock_file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._lock_file, fcntl.LOCK_UN)


def _write(descriptor: int, data: bytes) -> None:
    while data:
        try:
            data = data[os.write(descriptor, data) :]
        except BlockingIOError:  # another process may have made the pipe non-blocking
            select.select((), (descriptor,), (), 1.0)


class ExporterFilter(logging.Filter):
    """Passes each message of the trace exporter once a minute, as a collector may be down for days."""

    def __init__(self) -> None:
        super().__init__()
        self._next: dict[tuple[str, str], float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        if not record.name.startswith(EXPORTER):
            return True
        key, now = (record.name, str(record.msg)), time.monotonic()
        if now < self._next.get(key, 0.0):
            return False
        self._next[key] = now + EXPORTER_SECONDS
        return True


def configure_logging(options: LogOptions, process: str = "") -> None:
    """Configures root logging on stderr. ``process``: name in log lines, for example ``engine-0``."""
    handler: logging.Handler
    if options.format == "json":
        handler = LineHandler(options)
        handler.setFormatter(JsonFormatter(process or "server"))
        _log_uncaught()
    else:
        handler = logging.StreamHandler(sys.stderr)
        named = f"{process}[{os.getpid()}] " if process else ""
        handler.setFormatter(OneLineFormatter(f"%(asctime)s %(levelname)s {named}%(name)s: %(message)s"))
    handler.addFilter(ExporterFilter())
    logging.basicConfig(level=options.level.upper(), handlers=[handler])
    quiet = max(logging.WARNING, logging.getLogger().level)
    logging.getLogger("uvicorn").setLevel(quiet)
    for name in CHATTY:
        logging.getLogger(name).setLevel(logging.NOTSET if options.level.lower() == "debug" else quiet)


def share_lock(path: str) -> None:
    """Sets the lock file of this process, which its child processes use as well."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, LineHandler):
            handler.use_lock(path)


def inherited_options() -> LogOptions:
    """Returns the options for a child of this process."""
    root = logging.getLogger()
    level = logging.getLevelName(root.getEffectiveLevel()).lower()
    mine = next((each.options for each in root.handlers if isinstance(each, LineHandler)), LogOptions())
    return msgspec.structs.replace(mine, level=level)


def _log_uncaught() -> None:
    """Logs warnings and uncaught exceptions, which Python would print on several lines."""
    logger = logging.getLogger("chorale.uncaught")

    def uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None, /) -> None:
        if issubclass(kind, KeyboardInterrupt):
            return
        logger.critical("the process ended with an error", exc_info=(kind, error, trace))

    def in_thread(args: threading.ExceptHookArgs, /) -> None:
        if args.exc_value is not None:
            found = (args.exc_type, args.exc_value, args.exc_traceback)
            logger.critical("a thread ended with an error", exc_info=found)

    sys.excepthook = uncaught
    threading.excepthook = in_thread
    logging.captureWarnings(True)
