"""DraftLengths: how many draft tokens each row of a step gets.

A draft token pays if it brings more tokens a second than the step has without it. Its gain is the probability
that it is accepted (``Acceptance``), its cost the time by which it prolongs the step (``StepCosts``). Gains
of all rows are taken in descending order for as long as the expected tokens of a step by its seconds rise,
so that each row has a number of its own and a batch for which no draft pays has none.

The choice is made again every few steps. What is never chosen would never be measured again, so from time to
time a step tries another number. What tries lose may be a small share of the time: each waits until the
longest loss that it can cause is saved, and what it has not lost is saved again.

An operator's ranges of rows replace all of this.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from chorale.engine.drafts.acceptance import Acceptance, Floats
from chorale.engine.drafts.costs import PLACES, StepCosts, at, range_of
from chorale.engine.plan import StepRecord
from chorale.engine.types import IntArray, StepResult

_EVERY = 8  # steps between two choices
_EVERY_OFF = 32  # the same while drafts do not pay
_TRIES = 0.006  # share of the time that tries may take
_MOST_PATIENCE = 16.0  # tries become rarer up to so many times while the choice stays the same
_LEAST_LOSS = 0.25  # of a step; so there are at least 40 steps between two tries
_MARGIN = 1.01  # drafts must bring at least so many times the tokens a second
_MANY = 256  # gains; of more, the sums are compared at about so many places


@dataclass(frozen=True, slots=True)
class LengthLimits:
    """The operator's decisions. ``ranges``: (fewest rows, most rows, draft tokens), in order."""

    most: int
    ranges: tuple[tuple[int, int, int], ...] = ()
    disable_at: int | None = None  # no drafts in steps of at least so many rows

    def fixed(self, rows: int) -> int | None:
        """Return the draft tokens of each row if they are not to be chosen."""
        if self.disable_at is not None and rows >= self.disable_at:
            return 0
        if not self.ranges:
            return None
        return next((count for low, _, count in reversed(self.ranges) if rows >= low), 0)


@dataclass(frozen=True, slots=True)
class _Best:
    """The choice for a step."""

    gain: float  # the least gain of a draft token that pays; infinite if none does
    count: float  # draft tokens of a row, the mean
    rate: float  # expected tokens a second


@dataclass(frozen=True, slots=True)
class _Try:
    """A step with another number of draft tokens than the best that is known."""

    count: int  # of each row
    price: float  # seconds that it loses if no draft is accepted
    rate: float  # tokens a second without it


class DraftLengths:
    """Chooses the draft tokens of each row. One for each engine; called between steps."""

    def __init__(
        self,
        limits: LengthLimits,
        num_rows: int,
        costs: StepCosts | None = None,
        *,
        is_uniform: bool = False,
        holds_rows: bool = False,
        steps_per_try: int = 1,
    ) -> None:
        """``is_uniform``: a step takes as long as if each row had the longest draft of all, so each gets as
        many tokens. ``holds_rows``: a row with a draft misses the next step, unless all rows have one.
        ``steps_per_try``: for how many steps the caller keeps a choice."""
        self.limits = limits
        self.costs = costs or StepCosts()
        self.acceptance = Acceptance(num_rows, limits.most)
        self._is_uniform, self._holds_rows = is_uniform, holds_rows
        self._tries = _TRIES / steps_per_try
        self._patience: dict[
            int, tuple[float, float]
        ] = {}  # by range of rows: the choice, see _MOST_PATIENCE
        self._expected: Floats = np.zeros((num_rows, limits.most))  # at the last choice
        self._gain = np.inf  # the least gain of a draft token that pays
        self._count = 0.0  # draft tokens of a row, the mean, at the last choice
        self._range = -1  # of rows, for which it was made
        self._age = 0  # steps until the next
        self._saved = 0.0  # seconds that tries may still cost
        self._try: _Try | None = None  # the next one
        self._tried: dict[int, _Try] = {}  # those in flight, by step
        self._num_tries = 0
        self._is_try = False
        self._last_step = -2
        self._last_time = 0.0

    def choose(self, rows: IntArray, step_id: int) -> IntArray | None:
        """Return the draft tokens of each of the decoding rows of a step. None: no row gets any."""
        num_rows = len(rows)
        if not num_rows:
            return None
        fixed = self.limits.fixed(num_rows)
        if fixed is not None:
            return np.full(num_rows, fixed, np.int32) if fixed else None
        self._age -= 1
        if self._age < 0 or range_of(num_rows) != self._range:
            self._decide(rows)
        tried = self._try if self._try is not None and self._saved >= self._try.price else None
        self._is_try = tried is not None
        if tried is not None:
            self._tried[step_id] = tried
            self._saved -= tried.price
            self._num_tries += 1
            self._age = 0
            return np.full(num_rows, tried.count, np.int32) if tried.count else None
        if self._gain == np.inf:
            return None
        if self._is_uniform:
            return np.full(num_rows, round(self._count), np.int32)
        return _count(self._expected[rows] >= self._gain)

    def trim(self, num_rows: int, rows: IntArray, found: IntArray) -> IntArray:
        """Return how many tokens to keep of the drafts that were found: ``found`` tokens for ``rows``, in a
        step of ``num_rows`` rows in total. For drafters that do not find a draft for every row."""
        if self._is_try or self.limits.fixed(num_rows) is not None or not len(rows):
            return found
        expected = self.acceptance.expected(rows)
        expected[np.arange(self.limits.most) >= found[:, None]] = 0.0
        if self._holds_rows and len(rows) < num_rows:
            expected[expected.sum(axis=1) <= 1] = 0.0
        return _count(expected >= self._best(num_rows, expected).gain)

    def forget(self, row: int) -> None:
        """Begin with a new sequence in a row."""
        self.acceptance.forget(row)
        self._expected[row] = self.acceptance.expected(np.array([row], np.int32))[0]

    def observe(self, record: StepRecord, result: StepResult, now: float) -> None:
        """Learn from a step whose result has come at ``now``: how long it took, since the result before it,
        and which drafts were accepted."""
        plan, seconds = record.plan, now - self._last_time
        follows = plan.step_id == self._last_step + 1
        self._last_step, self._last_time = plan.step_id, now
        tried = self._tried.pop(plan.step_id, None)
        if self.limits.ranges:
            return
        if plan.num_drafts is not None:
            entries = np.flatnonzero(plan.num_drafts)
            accepted = np.maximum(result.num_sampled[entries] - 1, 0)
            self.acceptance.observe(plan.rows[entries], plan.num_drafts[entries], accepted)
        if plan.num_made >= 0 and plan.num_made + 1 != plan.num_new.max():
            return  # between two numbers: it verifies other drafts than it makes
        # Rows were decoding when the last result came, so the engine has not waited since.
        if not follows or seconds <= 0 or not record.num_decodes or record.chunks:
            return
        rows = len(plan.rows)
        self.costs.observe(rows, plan.num_tokens / rows, seconds)
        self._saved += self._tries * seconds / self._patience.get(self._range, (0.0, 1.0))[1]
        if tried is not None:
            loss = seconds - int(result.num_sampled.sum()) / tried.rate
            self._saved += max(0.0, min(tried.price, tried.price - loss))
        if self._try is not None:
            self._saved = min(self._saved, 2 * self._try.price)

    # ------------------------------------------------------------------ the choice

    def _decide(self, rows: IntArray) -> None:
        num_rows = len(rows)
        self._range, self._try = range_of(num_rows), None
        self.acceptance.relax()
        expected = self.acceptance.expected(rows)
        self._expected[rows] = expected
        if not self.costs.knows(num_rows):  # of steps without drafts: measure one first
            self._gain, self._count, self._age = np.inf, 0.0, 0
            return
        best = self._best(num_rows, expected)
        self._be_patient(best.count)
        self._gain, self._count = best.gain, best.count
        if self._gain == np.inf:
            self._age = _EVERY_OFF
        else:  # what is only estimated is measured once, then compared again
            self._age = _EVERY if self.costs.is_measured(num_rows, 1 + self._count) else 0
        self._plan_try(num_rows, best)

    def _best(self, num_rows: int, expected: Floats) -> _Best:
        curve = self.costs.curve(num_rows)
        if self._is_uniform:
            sums, tokens = np.cumsum(expected.sum(axis=0)), np.arange(1, expected.shape[1] + 1) * num_rows
            gains = expected.min(axis=0)
        else:
            gains = np.sort(expected, axis=None)[::-1]
            sums, tokens = np.cumsum(gains), np.arange(1, len(gains) + 1)
            if len(gains) > _MANY:
                some = np.linspace(0, len(gains) - 1, _MANY).astype(np.int64)
                gains, sums, tokens = gains[some], sums[some], tokens[some]
        rates = (num_rows + sums) / at(curve, 1 + tokens / num_rows)
        best = int(np.argmax(rates))
        if rates[best] < _MARGIN * num_rows / curve[0]:
            return _Best(np.inf, 0.0, num_rows / float(curve[0]))
        return _Best(float(gains[best]), float(tokens[best] / num_rows), float(rates[best]))

    def _be_patient(self, count: float) -> None:
        """Try less often what has not changed the choice for this range of rows."""
        before, patience = self._patience.get(self._range, (count, 1.0))
        if round(before) != round(count):
            patience = 1.0
        elif self._is_try and self._is_uniform:  # else a try costs little: a few rows of one step
            patience = min(2 * patience, _MOST_PATIENCE)
        self._patience[self._range] = count, patience

    def _plan_try(self, num_rows: int, best: _Best) -> None:
        """Choose what to try next: in turn no drafts, one token more than chosen, and the longest."""
        most, curve = self.limits.most, self.costs.curve(num_rows)
        counts = dict.fromkeys((min(round(best.count) + 1, most), 0, most, 1))
        others = [count for count in counts if count != best.count]
        if not others:
            return
        count = others[self._num_tries % len(others)]
        loss = float(at(curve, PLACES[:1] + count)[0]) - num_rows / best.rate
        self._try = _Try(count, max(loss, _LEAST_LOSS * float(curve[0])), best.rate)


def _count(pays: npt.NDArray[np.bool_]) -> IntArray:
    counts: IntArray = np.count_nonzero(pays, axis=1).astype(np.int32)
    return counts
