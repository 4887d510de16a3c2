"""Errors of an evaluation."""

from __future__ import annotations

from chorale.errors import ChoraleError, ConfigError


class AskError(ChoraleError):
    """A request got no answer. Recorded for its sample; the run continues."""


class UnansweredError(AskError):
    """No attempt got an answer. The sample has no score, and a resumed run asks again."""


class RefusedError(AskError):
    """The server refused the request, for example because it is too long. The sample scores 0."""


class JournalError(ConfigError):
    """The folder of a run cannot be used: it belongs to another run, or its journal is damaged."""


class ServerLostError(ChoraleError):
    """The server no longer answers requests. The run ends and can be resumed."""
