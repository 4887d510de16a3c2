"""PatientSender: sends a line until the server has answered it, even if the engine is away meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import msgspec

from chorale.jobs.execute import Sender
from chorale.jobs.line import Answer, Line
from chorale.requests.openai_client import BUSY, NoAnswerError, Retries

# A line in flight while the engine died may be the reason: it is answered by an error in the end.
MAX_CRASHES = 10
MAX_ERRORS = 3  # answers with status 500, or none at all
CRASHED = "engine_restarted"
_DELAYS = Retries(first_delay=0.1, longest_delay=10.0)


class _Error(msgspec.Struct):
    code: str | None = None


class _Body(msgspec.Struct):
    error: _Error | None = None


class PatientSender:
    """Implements ``Sender``. ``ready`` returns once the engine can take requests."""

    def __init__(self, send: Sender, ready: Callable[[], Awaitable[None]]) -> None:
        self._send, self._ready = send, ready

    async def __call__(self, line: Line) -> Answer:
        num_busy = num_crashes = num_errors = 0
        while True:
            await self._ready()
            asked: float | None = None
            try:
                answer = await self._send(line)
            except NoAnswerError:
                num_errors += 1
                if num_errors >= MAX_ERRORS:
                    raise
            else:
                if answer.status < 500 and answer.status not in BUSY:
                    return answer
                crashed = answer.status in BUSY and _code(answer) == CRASHED
                num_crashes += crashed
                num_errors += answer.status not in BUSY
                if num_crashes >= MAX_CRASHES or num_errors >= MAX_ERRORS:
                    return answer
                asked = answer.retry_after if not crashed else None
            await asyncio.sleep(_DELAYS.delay(min(num_busy, 16), asked))
            num_busy += 1


def _code(answer: Answer) -> str | None:
    try:
        error = msgspec.json.decode(answer.body, type=_Body).error
    except (ValueError, msgspec.MsgspecError):
        return None
    return None if error is None else error.code
