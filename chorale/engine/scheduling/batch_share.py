"""BatchShare: limits the batch work of a step, so that a new request waits only shortly.

A new request waits for the current step. A step with batch work may therefore take about ``batch_delay``
seconds, or 1.25 times as long as the other rows alone, or 1.5 times as long as a single row, whichever is
longest. After ``QUIET`` seconds without other requests it may take ``long_batch_delay``: larger steps give
several times the tokens per second. The next request ends this phase at once. With ``batch_waits``, a step
with other rows has no batch row at all.

The number of rows that fit is learned: it rises after each shorter step and falls after each longer one.
Batch rows beyond it stay admitted but skip the step; the oldest rows go first. Prompts get the remaining
time; if it is too short for a chunk, it is saved up over several steps. Samples depend only on a row's seed
and position, so a pause does not change them.
"""

from __future__ import annotations

from chorale.engine.plan import StepRecord
from chorale.engine.scheduling.pace import PromptPace
from chorale.engine.types import EngineLimits

QUIET = 10.0
_LONGER = 1.25  # multiple of the time of a step with only the other rows
_OF_ONE = 1.5  # multiple of the time of a step with one row: a slow device cannot promise a shorter wait
_LEAST_LEFT = 1 / 8  # fraction of a step's time that prompts always get
_SLACK = 0.85  # a step below this fraction of the time counts as short
_LEAST_FACTOR = 0.5  # one long step at most halves the rows, because it may have waited for a graph
_FIRST_ROWS = 8.0


class BatchShare:
    """Limits batch work. Call ``begin``, ``prompt_seconds`` and ``spend`` per step, then ``observe`` its
    time."""

    def __init__(self, limits: EngineLimits, pace: PromptPace) -> None:
        self._delays = {False: limits.batch_delay, True: max(limits.batch_delay, limits.long_batch_delay)}
        self._most = float(limits.max_num_seqs)
        first = _FIRST_ROWS if limits.batch_delay else self._most
        self._rows = dict.fromkeys(self._delays, min(first, self._most))  # is quiet -> batch rows
        self._pace = pace
        self._is_quiet = False
        self._others_at: float | None = None  # time of the last step with another request
        self._saved = 0.0  # seconds

    @property
    def num_rows(self) -> int:
        """The number of batch rows that a step may decode, and therefore of rows that may run."""
        return max(1, int(self._rows[self._is_quiet]))

    def begin(self, num_others: int, now: float) -> int:
        """Begin planning a step in which ``num_others`` other rows decode. Returns ``num_rows``."""
        if self._others_at is None:
            self._others_at = now
        self._is_quiet = not num_others and now - self._others_at > QUIET
        return self.num_rows

    def see_others(self, now: float) -> None:
        """Note that other requests are running or waiting."""
        self._others_at = now

    def prompt_seconds(self, num_others: int, num_batch: int) -> float | None:
        """Return the seconds that batch prompts may take in this step; None: they wait for a later step."""
        if not self._delays[False]:
            return 0.0  # no bound
        bound = self._bound(num_others)
        left = bound - self._pace.decode_seconds(num_others + num_batch)
        self._saved = min(self._saved + max(left, bound * _LEAST_LEFT), bound)
        if num_others + num_batch and self._saved < self._pace.least_batch_seconds:
            # A chunk that is too expensive to fit gets a step once the time of a whole step is saved.
            return None if self._saved < bound else self._saved
        return self._saved

    def spend(self, seconds: float) -> None:
        """Subtract the expected time of planned chunks."""
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
