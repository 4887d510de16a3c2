"""One sample's conversation with the model, recorded for the journal."""

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

    An entry repeats nothing of the one before: ``kept`` is the number of messages that both begin with.
    ``fields`` are those of the run; an ``ask`` may override them.
    """

    def __init__(self, server: Server, wire: Wire, model: str, fields: Mapping[str, Any]) -> None:
        self._server, self._wire, self._model, self._fields = server, wire, model, fields
        self._before: list[Message] = []
        self._tools: list[dict[str, Any]] | None = None
        self.exchanges: list[dict[str, Any]] = []
        self.usage = TokenUsage()
        self.seconds = 0.0
        self.finish_reason = ""
        self.fingerprint = ""

    async def ask(
        self, messages: Sequence[Message], *, tools: Sequence[dict[str, Any]] | None = None, **fields: Any
    ) -> Reply:
        entry = self._entry(messages, tools, fields)
        self.exchanges.append(entry)
        wanted = {name: value for name, value in (dict(self._fields) | fields).items() if value is not None}
        body = self._wire.body(self._model, messages, tools, wanted)
        began = time.monotonic()
        answer = await self._server.post(self._wire.path, body)
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

    def _entry(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] | None, fields: dict[str, Any]
    ) -> dict[str, Any]:
        pairs = zip(self._before, messages, strict=False)
        kept = next((i for i, (old, new) in enumerate(pairs) if old != new), None)
        if kept is None:
            kept = min(len(self._before), len(messages))
        self._before = list(messages)
        entry: dict[str, Any] = {"kept": kept, "messages": list(messages[kept:])}
        given = None if tools is None else list(tools)
        if given != self._tools:
            entry["tools"] = self._tools = given
        if fields:
            entry["fields"] = fields
        return entry


def _short(reply: Reply) -> dict[str, Any]:
    """Returns the parts of a reply that are not empty."""
    found = {name: value for name, value in asdict(reply).items() if value}
    found["usage"] = {name: value for name, value in found["usage"].items() if value}
    return found
