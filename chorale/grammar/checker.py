"""GrammarChecker: compiles constraints before their requests are submitted, in threads of the HTTP process.

A constraint that does not compile, or not in time, is a 400 that names the field. The engine only gets
grammars whose parts have compiled under the same limits. Results are cached by the constraint's text.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from chorale.errors import QueueFullError, RequestError
from chorale.grammar.constraint import Constraint
from chorale.grammar.matcher import check_constraint, tokenizer

DEADLINE = 2.0  # seconds for one constraint, including the wait for a thread
MAX_PENDING = 64
CACHE_BYTES = 64 * 1024 * 1024
_ENTRY_BYTES = 256  # beside the text


class GrammarChecker:
    """One per HTTP process. Its threads start with the first constraint."""

    def __init__(self, cache_bytes: int = CACHE_BYTES) -> None:
        self._cache_bytes = cache_bytes
        self._threads: ThreadPoolExecutor | None = None
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
                raise RequestError(
                    f"{constraint.param}: {verdict}", param=constraint.param, code="unsupported_value"
                )

    async def _compile(self, constraint: Constraint) -> str | None:
        """Returns why a constraint cannot be used, or None."""
        if self._num_pending >= MAX_PENDING:
            raise QueueFullError("too many grammars are being compiled; try again", retry_after=1)
        if self._threads is None:
            self._threads = ThreadPoolExecutor(2, thread_name_prefix="grammar-check")
        self._num_pending += 1
        try:
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(self._threads, tokenizer)  # takes a second, which does not count
            work = loop.run_in_executor(self._threads, check_constraint, constraint)
            await asyncio.wait_for(asyncio.shield(work), DEADLINE)
        except TimeoutError:
            work.add_done_callback(lambda done: done.exception())  # no request waits for it
            return f"takes longer than {DEADLINE:g} s to compile"
        except ValueError as error:
            return str(error)
        finally:
            self._num_pending -= 1
        return None

    def _remember(self, key: tuple[str, str, bool], verdict: str | None) -> None:
        if key not in self._verdicts:  # else another request was faster
            self._size += _ENTRY_BYTES + len(key[1])
        self._verdicts[key] = verdict
        while self._size > self._cache_bytes and len(self._verdicts) > 1:
            (_, body, _), _ = self._verdicts.popitem(last=False)
            self._size -= _ENTRY_BYTES + len(body)

    def close(self) -> None:
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)
