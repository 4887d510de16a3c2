"""The requests of one sample, recorded for the journal."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from chorale.requests.usage import TokenUsage
from chorale_evals.errors import UnansweredError
from chorale_evals.server import Server
from chorale_evals.task import Message, Reply
from chorale_evals.wire import Wire


class RecordingSession:
    """Implements ``Session``. ``exchanges`` grows by one entry per request.

    ``fields`` are those of the run; an ``ask`` may override them.
    """

    def __init__(self, server: Server, wire: Wire, model: str, fields: Mapping[str, Any]) -> None:
        self._server, self._wire, self._model, self._fields = server, wire, model, fields
        self.exchanges: list[dict[str, Any]] = []
        self.usage = TokenUsage()
        self.seconds = 0.0
        self.finish_reason = ""
        self.fingerprint = ""

    async def ask(self, messages: Sequence[Message], **fields: Any) -> Reply:
        entry: dict[str, Any] = {"messages": list(messages)} | ({"fields": fields} if fields else {})
        self.exchanges.append(entry)
        wanted = {name: value for name, value in {**self._fields, **fields}.items() if value is not None}
        began = time.monotonic()
        answer = await self._server.post(self._wire.path, self._wire.body(self._model, messages, wanted))
        self.seconds += time.monotonic() - began
        try:
            reply = self._wire.read(answer)
        except ValueError as error:
            raise UnansweredError(f"the answer cannot be read: {error}") from None
        entry["reply"] = _short(reply)
        self.usage += reply.usage
        self.finish_reason = reply.finish_reason
        self.fingerprint = str(answer.get("system_fingerprint") or self.fingerprint)
        return reply


def _short(reply: Reply) -> dict[str, Any]:
    """Returns the parts of a reply that are not empty."""
    found = {name: value for name, value in asdict(reply).items() if value}
    found["usage"] = {name: value for name, value in found["usage"].items() if value}
    return found
