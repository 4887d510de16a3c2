"""BatchShare: how much batch work a step may do, so that a request that arrives meanwhile waits only shortly.

A new request waits for the step that runs. A step with batch work therefore takes about ``batch_delay``
seconds, or a quarter longer than the other rows alone, or half as long again as a single row, whichever is
longest. After ``QUIET`` seconds without other requests it may take ``long_batch_delay``: larger steps give
several times the tokens a second, and the next request ends this at once. With ``batch_waits`` a step with
other rows has no batch row at all.

How many rows fit into that is learned: more after each step that was shorter, fewer after one that was
longer. Batch rows beyond this keep their place and skip the step; the oldest go first. Prompts get the time
that is left over; if it is too short for a chunk, it is saved up over several steps. What a row samples
depends on its seed and position only, so a pause changes nothing.
"""

from __future__ import annotations

from chorale.engine.plan import StepRecord
from chorale.engine.scheduling.pace import PromptPace
from chorale.engine.types import EngineLimits

QUIET = 10.0
_LONGER = 1.25  # of a step of the other rows alone
_OF_ONE = 1.5  # times a step of one row: where that takes long, nobody expects a shorter wait
_LEAST_LEFT = 1 / 8  # of the time of a step, that prompts get in any case
_SLACK = 0.85  # of the time, below which a step was short
_LEAST_FACTOR = 0.5  # by which one long step may reduce the rows: it may have waited for a graph
_FIRST_ROWS = 8.0


class BatchShare:
    """Call ``begin`` for a step, then ``prompt_seconds`` and ``spend``, and ``observe`` with its time."""

    def __init__(self, limits: EngineLimits, pace: PromptPace) -> None:
        self._delays = {False: limits.batch_delay, True: max(limits.batch_delay, limits.long_batch_delay)}
        self._most = float(limits.max_num_seqs)
        first = _FIRST_ROWS if limits.batch_delay else self._most
        self._rows = dict.fromkeys(self._delays, min(first, self._most))  # by whether it is quiet
        self._pace = pace
        self._is_quiet = False
        self._others_at: float | None = None  # when another request was last at work
        self._saved = 0.0  # seconds

    @property
    def num_rows(self) -> int:
        """Returns how many batch rows a step may decode, and so how many may run."""
        return max(1, int(self._rows[self._is_quiet]))

    def begin(self, num_others: int, now: float) -> int:
        """Begin planning a step in which ``num_others`` other rows decode. Returns ``num_rows``."""
        if self._others_at is None:
            self._others_at = now
        self._is_quiet = not num_others and now - self._others_at > QUIET
        return self.num_rows

    def see_others(self, now: float) -> None:
        """Note that other requests are at work."""
        self._others_at = now

    def prompt_seconds(self, num_others: int, num_batch: int) -> float | None:
        """Return how long the prompts of the batch may take in this step; None: they wait for a later one."""
        if not self._delays[False]:
            return 0.0  # no bound
        bound = self._bound(num_others)
        left = bound - self._pace.decode_seconds(num_others + num_batch)
        self._saved = min(self._saved + max(left, bound * _LEAST_LEFT), bound)
        if num_others + num_batch and self._saved < self._pace.least_batch_seconds:
            # Too expensive a chunk never fits: it gets a step once the time of one is saved.
            return None if self._saved < bound else self._saved
        return self._saved

    def spend(self, seconds: float) -> None:
        """Count the time that chunks were expected to take."""
        self._saved = max(0.0, self._saved - seconds)

    def observe(self, record: StepRecord, seconds: float) -> None:
        """Learn from a step without prompts that ran for ``seconds``."""
        if not self._delays[False] or record.chunks or not record.num_batch or seconds <= 0:
            return
        rows, bound = self._rows, self._bound(record.num_decodes - record.num_batch)
        if seconds > bound:
            factor = max(bound / seconds, _LEAST_FACTOR)
            rows[self._is_quiet] = max(1.0, min(rows[self._is_quiet], record.num_batch) * factor)
        elif seconds < bound * _SLACK and record.num_batch >= self.num_rows:
            grown = rows[self._is_quiet] + max(1.0, rows[self._is_quiet] / 16)
            rows[self._is_quiet] = min(self._most, grown)

    def _bound(self, num_others: int) -> float:
        known = self._pace.decode_seconds
        return max(self._delays[self._is_quiet], _LONGER * known(num_others), _OF_ONE * known(1))
