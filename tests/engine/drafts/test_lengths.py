"""How many draft tokens a row gets: nearly as good as the best number that could have been fixed beforehand,
whatever steps cost and drafts bring; and none, at next to no cost, where none pay."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pytest

from chorale.engine.drafts.costs import StepCosts
from chorale.engine.drafts.lengths import DraftLengths, LengthLimits
from chorale.engine.plan import StepRecord
from chorale.engine.types import IntArray, StepPlan, StepResult

MOST = 5
Cost = Callable[[int, float], float]  # seconds by rows and tokens a row


def gpu(rows: int, tokens: float) -> float:
    """Experts are read once each; then the tokens' arithmetic counts."""
    every = rows * tokens
    return 1e-3 * (1.2 + (1 - math.exp(-every / 24)) + 0.012 * every)


def cpu(rows: int, tokens: float) -> float:
    """Nearly in proportion to the tokens."""
    return 0.004 + 0.012 * rows * tokens


def flat(rows: int, tokens: float) -> float:
    """Reading the weights takes nearly all of the time."""
    return 0.002 + 1e-5 * rows * tokens


def jump(rows: int, tokens: float) -> float:
    """Steps with drafts run other kernels."""
    return 0.002 + (0.001 if tokens > 1 else 0.0) + 2e-5 * rows * tokens


COSTS: dict[str, Cost] = {"gpu": gpu, "cpu": cpu, "flat": flat, "jump": jump}
NO_TOKENS = np.zeros(0, np.int32)


def record_of(step_id: int, drafts: IntArray) -> StepRecord:
    rows = np.arange(len(drafts), dtype=np.int32)
    tokens = np.zeros(len(drafts) + int(drafts.sum()), np.int32)
    plan = StepPlan(
        step_id, (), rows, rows, 1 + drafts, rows >= 0, tokens, *[NO_TOKENS] * 4,
        num_drafts=drafts if drafts.any() else None,
    )  # fmt: skip
    return StepRecord(plan, len(drafts), [])


@dataclass
class World:
    """Rows that decode for ever. ``accepts``: [rows, MOST], chances of each token, given those before."""

    cost: Cost
    accepts: npt.NDArray[np.float64]
    lengths: DraftLengths
    is_uniform: bool = False
    seed: int = 0
    noise: float = 0.03  # of the seconds, relative
    now: float = 1000.0
    tokens: float = 0.0  # the expected number: what luck adds is not the choice's
    step_id: int = 0
    drafted: list[float] = field(default_factory=list)  # tokens of a row, the mean of each step

    def __post_init__(self) -> None:
        self.random = np.random.default_rng(self.seed)

    def run(self, num_steps: int) -> float:
        """Return the tokens a second."""
        start, before = self.now, self.tokens
        rows = np.arange(len(self.accepts), dtype=np.int32)
        for _ in range(num_steps):
            counts = self.lengths.choose(rows, self.step_id)
            drafts = np.zeros(len(rows), np.int32) if counts is None else counts
            passed = np.cumprod(self.random.random(self.accepts.shape) < self.accepts, axis=1).sum(axis=1)
            kept = (1 + np.minimum(passed, drafts)).astype(np.int32)
            computed = 1 + float(drafts.max() if self.is_uniform else drafts.mean())
            wait = max(0.2, 1 + self.noise * self.random.standard_normal())
            self.now += self.cost(len(rows), computed) * wait
            result = StepResult(self.step_id, kept[:, None], kept)
            self.lengths.observe(record_of(self.step_id, drafts), result, self.now)
            chances = np.cumprod(self.accepts, axis=1)
            self.tokens += len(rows) + float(chances[np.arange(MOST) < drafts[:, None]].sum())
            self.step_id += 1
            self.drafted.append(float(drafts.mean()))
        return (self.tokens - before) / (self.now - start)


def world(
    cost: Cost, rows: int, accepts: float | list[float], *, is_uniform: bool = False, seed: int = 0
) -> World:
    lengths = DraftLengths(LengthLimits(MOST), rows, is_uniform=is_uniform)
    each = np.full((rows, MOST), accepts) if isinstance(accepts, float) else np.array(accepts)[:, None]
    return World(cost, np.broadcast_to(each, (rows, MOST)), lengths, is_uniform, seed)


def best_fixed(cost: Cost, accepts: npt.NDArray[np.float64]) -> tuple[float, int]:
    """The most tokens a second with one number of draft tokens for all rows and steps, and that number."""
    rows, chances = len(accepts), np.cumprod(accepts, axis=1)
    rates = [(rows + float(chances[:, :k].sum())) / cost(rows, 1 + k) for k in range(MOST + 1)]
    return max(rates), int(np.argmax(rates))


@pytest.mark.parametrize("rows", [1, *(pytest.param(n, marks=pytest.mark.slow) for n in (8, 64)), 256])
@pytest.mark.parametrize("kind", COSTS)
def test_nearly_as_fast_as_the_best_fixed_number(kind: str, rows: int) -> None:
    """The first steps, in which costs and chances are still unknown, count."""
    cost, found = COSTS[kind], {}
    for accepts in (0.3, 0.6, 0.9):
        for is_uniform in (False, True):
            made = world(cost, rows, accepts, is_uniform=is_uniform)
            found[accepts, is_uniform] = made.run(1200) / best_fixed(cost, made.accepts)[0]
    assert min(found.values()) > 0.97, found


def test_a_full_batch_gets_none_and_loses_less_than_one_percent() -> None:
    for kind, most in (("gpu", MOST), ("cpu", MOST), ("cpu", 1)):
        made = world(COSTS[kind], 256, 0.5)
        made.lengths = DraftLengths(LengthLimits(most), 256)
        rate, number = best_fixed(made.cost, made.accepts)
        assert number == 0
        made.run(500)
        assert made.run(1500) > 0.99 * rate
        tries = [drafted for drafted in made.drafted[500:] if drafted]
        assert 0 < len(tries) < 60  # what changes is noticed


def test_a_table_is_believed_from_the_first_step() -> None:
    table = {(rows, tokens): gpu(rows, tokens) for rows in (1, 64, 256) for tokens in range(1, 2 + MOST)}
    for rows, number in ((1, 4), (256, 0)):
        made = world(gpu, rows, 0.5)
        made.lengths.costs.prefill(table)
        made.run(60)  # the chances are learned
        assert abs(np.median(made.drafted[20:]) - number) <= 1


def test_a_row_gets_what_its_own_drafts_bring() -> None:
    made = world(gpu, 16, [0.95] * 8 + [0.02] * 8)
    assert made.run(3000) > 1.1 * best_fixed(made.cost, made.accepts)[0]
    counts = made.lengths.choose(np.arange(16, dtype=np.int32), made.step_id)
    assert counts is not None
    assert counts[:8].min() >= 3
    assert np.median(counts[8:]) <= 1


def test_a_change_is_noticed() -> None:
    made = world(cpu, 1, 0.3)
    made.run(1500)
    assert np.mean(made.drafted[-300:]) < 0.2
    made.accepts = np.full((1, MOST), 0.97)  # another kind of text
    made.run(4000)
    assert made.run(500) > 0.95 * best_fixed(cpu, made.accepts)[0]
    made.cost = lambda rows, tokens: 2 * jump(rows, tokens)  # another machine
    made.run(4000)
    assert made.run(500) > 0.95 * best_fixed(made.cost, made.accepts)[0]


def test_a_new_request_starts_from_the_mean_of_recent_ones() -> None:
    made = world(gpu, 8, 0.1)
    made.run(600)
    made.lengths.forget(3)
    expected = made.lengths.acceptance.expected(np.array([3], np.int32))[0]
    assert 0.05 < expected[0] < 0.2
    differing = world(gpu, 16, [0.95] * 8 + [0.02] * 8)
    differing.run(400)
    rows = np.arange(16, dtype=np.int32)
    differing.lengths._saved, differing.lengths._age = -1.0, 5  # no try and no new choice now
    before = differing.lengths.choose(rows, differing.step_id)
    differing.lengths.forget(15)
    after = differing.lengths.choose(rows, differing.step_id + 1)
    assert before is not None
    assert after is not None
    assert after[15] > before[15]


def test_the_operators_ranges_replace_the_choice() -> None:
    lengths = DraftLengths(LengthLimits(3, ((1, 4, 3), (9, 16, 1), (33, 64, 0)), disable_at=48), 64)

    def chosen(rows: int) -> list[int]:
        counts = lengths.choose(np.arange(rows, dtype=np.int32), 0)
        return [] if counts is None else sorted(set(counts.tolist()))

    assert [chosen(rows) for rows in (1, 4, 7, 9, 20, 33, 48, 64)] == [[3], [3], [3], [1], [1], [], [], []]
    few = np.array([2, 3], np.int32)
    assert lengths.trim(4, few, few).tolist() == [2, 3]
    only_off = DraftLengths(LengthLimits(3, disable_at=2), 8)
    only_off.costs.prefill({(rows, tokens): 1.0 for rows in (1, 2) for tokens in range(1, 5)})
    assert only_off.choose(np.arange(1, dtype=np.int32), 0) is not None
    assert only_off.choose(np.arange(2, dtype=np.int32), 0) is None


def test_found_drafts_are_cut_to_what_pays() -> None:
    """One row of 64 has a draft: alone it does not pay for the other kernels of a step with drafts."""
    table = {(64, tokens): jump(64, tokens) for tokens in range(1, 2 + MOST)}
    lengths = DraftLengths(LengthLimits(MOST), 64)
    lengths.costs.prefill(table)
    rows = np.arange(64, dtype=np.int32)
    lengths.acceptance.observe(rows, rows * 0 + MOST, rows * 0 + 4)
    assert lengths.choose(rows, 0) is not None
    assert lengths.trim(64, rows[:1], np.array([MOST], np.int32)).tolist() == [0]
    assert lengths.trim(64, rows, rows * 0 + 3).min() == 3


def test_a_row_that_waits_for_its_draft_must_gain_a_step() -> None:
    lengths = DraftLengths(LengthLimits(2), 8, holds_rows=True)
    lengths.costs.prefill({(8, 1): 1.0, (8, 2): 1.01, (8, 3): 1.02})
    rows = np.arange(8, dtype=np.int32)
    lengths.acceptance.observe(rows, rows * 0 + 2, rows * 0)
    lengths.acceptance.observe(rows[:2], rows[:2] * 0 + 2, rows[:2] * 0 + 2)
    assert lengths.choose(rows, 0) is not None
    assert lengths.trim(8, rows[1:3], np.array([2, 2], np.int32)).tolist() != [2, 2]
    assert lengths.trim(8, rows, rows * 0 + 2).max() == 2


def test_what_is_not_known_is_estimated_low() -> None:
    costs = StepCosts()
    costs.observe(4, 1.0, 0.010)
    assert costs.seconds(4, 5.0) == pytest.approx(0.010)
    costs.observe(4, 5.0, 0.9)  # compiled a kernel: no step is slower than one for each token
    assert costs.seconds(4, 5.0) == pytest.approx(0.050)
    costs.observe(4, 5.0, 0.020)
    assert costs.seconds(4, 5.0) < 0.03
    assert 0.010 < costs.seconds(4, 3.0) < 0.03
    costs.observe(64, 1.0, 0.020)  # other rows: the nearest curve, in proportion
    assert costs.seconds(64, 5.0) == pytest.approx(2 * costs.seconds(4, 5.0))
    assert costs.seconds(4, 1.1) == costs.seconds(4, 1.25)


def test_idle_time_and_prompts_are_no_cost() -> None:
    lengths = DraftLengths(LengthLimits(MOST), 4)
    kept = np.ones(4, np.int32)
    for step_id, now in enumerate((1.0, 1.01, 9.0)):
        record = record_of(step_id if step_id < 2 else 7, kept * 0)  # step 7 does not follow
        lengths.observe(record, StepResult(step_id, kept[:, None], kept), now)
    assert lengths.costs.seconds(4, 1.0) == pytest.approx(0.01)


def test_host_time_of_a_full_batch_without_drafts() -> None:
    """About 5 us a step on an idle core; the limit holds on a busy one."""
    made = world(cpu, 256, 0.5)
    made.run(300)
    rows, records = np.arange(256, dtype=np.int32), record_of(0, np.zeros(256, np.int32))
    kept = np.ones(256, np.int32)
    result = StepResult(0, kept[:, None], kept)
    took = []
    for _ in range(7):
        began = time.process_time()
        for step_id in range(100):
            made.lengths.choose(rows, step_id)
            made.lengths.observe(records, result, 0.0)
        took.append((time.process_time() - began) / 100)
    assert min(took) < 20e-6
