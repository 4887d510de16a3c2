"""The requests of one sample, recorded for the journal."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from chorale.errors import ChoraleError, ConfigError
from chorale.requests.openai_client import BUSY, AsyncClient, NoAnswerError, Retries, error_text
from chorale.requests.usage import TokenUsage
from chorale_evals.wire import Message, Reply, Wire

# Retries last about seven minutes, because a restarted engine loads its weights again.
RETRIES = Retries(attempts=12, patience=math.inf, first_delay=1.0, longest_delay=60.0)
_AGAIN = BUSY | {408, 409, 425, 500, 529}
# Statuses that every other request would get too.
_MISCONFIGURED = frozenset({401, 403, 404, 405})


class UnansweredError(ChoraleError):
    """No attempt got an answer. The sample has no score, and a resumed run asks again."""


class RefusedError(ChoraleError):
    """The server refused the request, for example because it is too long. The sample scores 0."""


class Session:
    """Sends requests and records them with their replies: ``exchanges`` gets one entry per request.

    ``fields``: the run's request fields in Chat Completions format; those given to ``ask`` override them.
    """

    def __init__(self, client: AsyncClient, wire: Wire, model: str, fields: Mapping[str, Any]) -> None:
        self._client, self._wire, self._model, self._fields = client, wire, model, fields
        self.exchanges: list[dict[str, Any]] = []
        self.usage = TokenUsage()
        self.seconds = 0.0
        self.finish_reason = ""
        self.fingerprint = ""

    async def ask(self, messages: Sequence[Message], **fields: Any) -> Reply:
        """Sends a conversation and returns the reply. Raises the same errors as ``_answer``."""
        entry: dict[str, Any] = {"messages": list(messages)} | ({"fields": fields} if fields else {})
        self.exchanges.append(entry)
        wanted = {name: value for name, value in {**self._fields, **fields}.items() if value is not None}
        began = time.monotonic()
        answer = await self._answer(self._wire.body(self._model, messages, wanted))
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

    async def _answer(self, body: dict[str, Any]) -> Any:
        """Returns the JSON of the answer.

        Raises ``RefusedError`` if the server refuses the request, ``UnansweredError`` after all attempts, and
        ``ConfigError`` if every request would fail (a wrong key, model or path).
        """
        path = self._wire.path
        try:
            response = await self._client.post(path, body, again=_AGAIN)
            if response.status_code == 200:
                return response.json()
        except NoAnswerError as error:
            raise UnansweredError(error.message) from None
        except ValueError as error:
            raise UnansweredError(f"the body is not JSON ({error})") from None
        if response.status_code in _MISCONFIGURED:
            raise ConfigError(f"the server refuses every request to {path}: {error_text(response)}")
        kind = UnansweredError if response.status_code in _AGAIN else RefusedError
        raise kind(error_text(response))


def _short(reply: Reply) -> dict[str, Any]:
    """Returns the fields of a reply that are not empty."""
    found = {name: value for name, value in asdict(reply).items() if value}
    found["usage"] = {name: value for name, value in found["usage"].items() if value}
    return found
