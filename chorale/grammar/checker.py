"""GrammarChecker: asks the engine whether it can use the constraints of a request, before the request is
submitted.

A constraint that does not compile is a 400 that names the field, also where the answer is streamed. The
engine's process compiles, because only it has the tokenizer. Results are cached by the constraint's text.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence

from chorale.errors import QueueFullError, RequestError
from chorale.grammar.constraint import Constraint
from chorale.grammar.frames import raw_grammar
from chorale.grammar.place import explained

MAX_PENDING = 64
CACHE_BYTES = 64 * 1024 * 1024
_ENTRY_BYTES = 256  # overhead of an entry, besides its text


class GrammarChecker:
    """One per HTTP process. ``ask`` returns the reason why a grammar cannot be used, or None."""

    def __init__(self, ask: Callable[[str], Awaitable[str | None]], cache_bytes: int = CACHE_BYTES) -> None:
        self._ask, self._cache_bytes = ask, cache_bytes
        self._verdicts: OrderedDict[tuple[str, str, bool], str | None] = OrderedDict()
        self._size = 0
        self._num_pending = 0

    async def check(self, constraints: Sequence[Constraint]) -> None:
        """Raises ``RequestError`` (param: the field) for the first one that cannot be used."""
        for constraint in constraints:
            key = (constraint.kind, constraint.body, constraint.tight)
            if key not in self._verdicts:
                self._remember(key, await self._compile(constraint))
            self._verdicts.move_to_end(key)
            verdict = self._verdicts[key]
            if verdict is not None:
                message = explained(constraint, verdict)
                raise RequestError(message, param=constraint.param, code="unsupported_value")

    async def _compile(self, constraint: Constraint) -> str | None:
        """Returns why a constraint cannot be used, or None."""
        if self._num_pending >= MAX_PENDING:
            raise QueueFullError("too many grammars are being compiled; try again", retry_after=1)
        self._num_pending += 1
        try:
            return await self._ask(raw_grammar(constraint))
        finally:
            self._num_pending -= 1

    def _remember(self, key: tuple[str, str, bool], verdict: str | None) -> None:
        if key not in self._verdicts:  # else another request was faster
            self._size += _ENTRY_BYTES + len(key[1])
        self._verdicts[key] = verdict
        while self._size > self._cache_bytes and len(self._verdicts) > 1:
            (_, body, _), _ = self._verdicts.popitem(last=False)
            self._size -= _ENTRY_BYTES + len(body)
