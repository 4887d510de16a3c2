"""What a step with drafts computes, keeps and gives back."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from chorale.engine.core import EngineCore
from chorale.engine.drafts.planner import HostDrafter
from chorale.engine.engine_state import Drafter
from chorale.engine.sequence import Sequence
from chorale.engine.types import IntArray, StepPlan, StepResult, TokenChunk
from tests.support.engine.drafters import Oracle
from tests.support.engine.fake_executor import FakeHandle
from tests.support.engine.recording import Engine, ends, tokens_by_choice
from tests.support.engine.simulation import Ticker


class Drafted(Engine):
    """An engine whose drafter knows the answers; keyword arguments as ``Oracle``'s in ``drafts``."""

    def __init__(self, drafts: dict[str, Any], **changes: Any) -> None:
        super().__init__(**changes)
        self.drafter = Oracle(self._future, vocab_size=1000, **drafts)
        self.use(self.drafter)

    def use(self, drafter: Drafter) -> None:
        self.core = EngineCore(self.limits, self.executor, Ticker(), drafter=drafter)

    def _future(self, sequence: Sequence) -> list[int]:
        prompt, limit = sequence.request.request.prompt_token_ids, self.limits.max_model_len
        return self.model.generate(prompt, sequence.sampling, sequence.seed, limit)[0]

    @property
    def drafted(self) -> tuple[int, int]:
        """Tokens that were drafted, and accepted of them."""
        stats = self.core.stats()
        return stats.num_draft_tokens, stats.num_accepted_tokens

    def held(self, name: str) -> tuple[int, int]:
        """Blocks of either group that a request's first choice holds."""
        blocks = self.core._engine.requests[name].sequences[0].blocks
        return len(blocks.full), len(blocks.window)


def shape(plan: StepPlan) -> list[tuple[int, int, int]]:
    """(computed, new, drafts) of each entry."""
    drafts = np.zeros(len(plan.rows), np.int32) if plan.num_drafts is None else plan.num_drafts
    return list(zip(plan.num_computed.tolist(), plan.num_new.tolist(), drafts.tolist(), strict=True))


def counts(chunks: list[TokenChunk]) -> list[int]:
    return [len(chunk.token_ids) for chunk in chunks]


def test_a_right_draft_of_k_tokens_gives_k_plus_one() -> None:
    engine = Drafted({"most": 3})
    engine.add("a", 4, max_tokens=9)
    chunks = engine.run()
    assert [shape(plan) for plan in engine.plans] == [[(4, 4, 3)] if i else [(0, 4, 0)] for i in range(2)] + [
        [(8, 4, 3)]
    ]
    assert counts(chunks) == [1, 4, 4]
    assert ends(chunks) == [("a", 0, "length")]
    assert engine.core.stats().generation_tokens == 9
    assert engine.drafted == (6, 6)


def test_a_wrong_draft_gives_one_token_and_none_is_accepted() -> None:
    engine = Drafted({"most": 3, "wrong": 1.0})
    engine.add("a", 4, max_tokens=4)
    chunks = engine.run()
    assert [shape(plan) for plan in engine.plans] == [[(0, 4, 0)], [(4, 3, 2)], [(5, 2, 1)], [(6, 1, 0)]]
    assert counts(chunks) == [1, 1, 1, 1]
    assert engine.drafted == (3, 0)


def test_a_step_has_as_many_draft_tokens_as_its_range_of_rows_says() -> None:
    """Three rows, then two, then one; a drafter is not asked where none are wanted."""
    engine = Drafted({"most": 9}, draft_tokens=((1, 4), (2, 1), (3, 0)))
    asked: list[int] = []
    propose = engine.drafter.propose

    def asking(sequence: Sequence, most: int) -> IntArray:
        asked.append(most)
        return propose(sequence, most)

    engine.drafter.propose = asking  # type: ignore[method-assign]
    for number, name in enumerate("abc", 1):
        engine.add(name, 4, max_tokens=6 * number)
    chunks = engine.run()
    most: dict[int, int] = {}
    for plan in engine.plans:
        longest = max(count for _, _, count in shape(plan))
        most[len(plan.rows)] = max(most.get(len(plan.rows), 0), longest)
    assert most == {3: 0, 2: 1, 1: 4}
    assert max(asked) == 4
    assert ends(chunks) == [("a", 0, "length"), ("b", 0, "length"), ("c", 0, "length")]
    assert engine.core.stats().accepted_per_position[0] == engine.core.stats().num_drafts


def test_no_draft_reaches_past_the_last_token() -> None:
    """``max_tokens`` and ``max_model_len`` are lengths; the plan never computes a token without successor."""
    for max_tokens in range(1, 9):
        engine = Drafted({"most": 30}, max_num_batched_tokens=64)
        engine.add("a", 5, max_tokens=max_tokens)
        chunks = engine.run()
        assert sum(counts(chunks)) == max_tokens
        assert all(sum(shape(plan)[0][:2]) <= 5 + max_tokens - 1 for plan in engine.plans)
    engine = Drafted({"most": 30}, max_model_len=20, max_num_batched_tokens=64)
    engine.add("a", 5)
    assert sum(counts(engine.run())) == 15


def test_the_tokens_after_a_stop_id_are_dropped() -> None:
    engine = Drafted({"most": 1})
    engine.add("a", 4, max_tokens=12)
    everything = tokens_by_choice(engine.run())["a", 0]

    class Beyond(HostDrafter):
        """Proposes what would follow if the stop id did not end the sequence."""

        def propose(self, sequence: Sequence, most: int) -> IntArray:
            known = len(sequence.output)
            return np.array(everything[known : known + most], np.int32)

        def end(self, sequence: Sequence) -> None:
            return None

    for place in range(1, 11):
        engine = Drafted({"most": 1})
        engine.use(Beyond())
        engine.add("a", 4, max_tokens=12, stop_token_ids=(everything[place],), logprobs=0)
        chunks = engine.run()
        assert [len(chunk.logprobs or []) for chunk in chunks] == counts(chunks)
        end = everything.index(everything[place]) + 1
        assert tokens_by_choice(chunks)["a", 0] == everything[:end]
        assert chunks[-1].stop_token_id == everything[place]
        assert engine.core.stats().generation_tokens == end


def test_drafts_take_what_the_budget_leaves() -> None:
    engine = Drafted({"most": 10}, max_num_batched_tokens=16)
    engine.add("a", 4, max_tokens=40)
    engine.step()
    engine.add("b", [1] * 30, max_tokens=2)
    engine.step()
    engine.step()
    engine.step()
    assert [shape(plan) for plan in engine.plans[1:]] == [
        [(4, 1, 0), (0, 15, 0)],
        [(5, 1, 0), (15, 15, 0)],
        [(30, 1, 0), (6, 11, 10)],  # plain decodes first
    ]


def test_the_budget_goes_to_the_best_key() -> None:
    engine = Drafted({"most": 10}, max_num_batched_tokens=9)
    for name in "ab":
        engine.add(name, 4, max_tokens=30)
    engine.step()
    engine.step()
    assert shape(engine.plans[-1]) == [(4, 1, 0), (4, 8, 7)]
    rows = {start.row: start for plan in engine.plans for start in plan.starts}
    assert engine.plans[-1].rows[-1] == min(rows, key=lambda row: engine.core._engine.running[row].key)


@pytest.mark.parametrize("depth", [0, 1])
def test_blocks_of_rejected_tokens_are_given_back(depth: int) -> None:
    engine = Drafted({"most": 9, "wrong": 1.0}, async_scheduling=depth)
    engine.add("a", 6, max_tokens=30)
    while not (engine.plans and engine.plans[-1].num_drafts is not None):
        engine.step()
    (computed, new, drafts), *_ = shape(engine.plans[-1])
    assert drafts >= 8
    engine.core._scheduler.schedule = lambda now: None  # type: ignore[method-assign]
    if depth:
        assert engine.held("a")[0] == -(-(computed + new) // 4)
        while engine.core._engine.in_flight:
            engine.step()
    sequence = engine.core._engine.requests["a"].sequences[0]
    assert engine.held("a")[0] == -(-sequence.num_tokens // 4)


class OnlyFor(HostDrafter):
    """Another drafter's drafts, for one request."""

    def __init__(self, request_id: str, drafter: Drafter) -> None:
        self._request_id, self._drafter = request_id, drafter

    def propose(self, sequence: Sequence, most: int) -> IntArray:
        if sequence.request_id != self._request_id:
            return np.zeros(0, np.int32)
        return self._drafter.propose(sequence, most)

    def end(self, sequence: Sequence) -> None:
        self._drafter.end(sequence)


@pytest.mark.parametrize("depth", [0, 1])
def test_a_draft_in_flight_takes_no_block_from_a_better_row(depth: int) -> None:
    """Both fit. While the worse row's draft holds blocks, the better one may need its next."""
    engine = Drafted({"most": 30, "wrong": 1.0}, num_blocks=26, async_scheduling=depth)
    engine.use(OnlyFor("worse", engine.drafter))
    for name in ("better", "worse"):
        engine.add(name, 9, max_tokens=31)
    engine.run()
    assert engine.drafted[0] > 20
    assert engine.core.stats().num_preemptions == 0


@pytest.mark.parametrize("depth", [0, 1])
def test_drafts_leave_blocks_that_admissions_count_on(depth: int) -> None:
    """Three rows that outgrow the pool, and drafts that want all of it: no allocation fails."""
    engine = Drafted({"most": 40}, num_blocks=24, max_num_batched_tokens=128, async_scheduling=depth)
    for name in "abc":
        engine.add(name, 9, max_tokens=25)
    assert {len(tokens) for tokens in tokens_by_choice(engine.run()).values()} == {25}
    assert engine.drafted[0] > 20


def test_a_row_waits_for_its_draft_and_others_do_not_wait() -> None:
    """With async scheduling: while a's draft is in flight, only b is planned."""
    engine = Drafted({"most": 2}, async_scheduling=True)
    engine.use(OnlyFor("a", engine.drafter))
    engine.add("a", 4, max_tokens=30)
    engine.add("b", 4, max_tokens=30)
    chunks = engine.run()
    row = engine.plans[0].starts[0].row
    for plan, following in zip(engine.plans, engine.plans[1:], strict=False):
        if plan.num_drafts is not None:
            assert plan.rows[plan.num_drafts > 0].tolist() == [row]
            assert row not in following.rows
    assert {len(tokens) for tokens in tokens_by_choice(chunks).values()} == {30}
    decodes_of_b = [i for i, plan in enumerate(engine.plans) if set(plan.rows.tolist()) - {row}]
    assert decodes_of_b == list(range(decodes_of_b[0], decodes_of_b[0] + 30)), "b missed a step"


def test_a_draft_may_follow_a_token_that_is_in_flight() -> None:
    engine = Drafted({"most": 4}, async_scheduling=True)
    engine.add("a", 4, max_tokens=20)
    engine.step()
    engine.step()
    plan = engine.plans[1]
    assert shape(plan) == [(4, 4, 3)]
    assert plan.token_ids[0] == -1


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("index", [None, 0])
def test_an_abort_while_a_draft_is_in_flight_ends_only_that_request(depth: int, index: int | None) -> None:
    engine = Drafted({"most": 5}, async_scheduling=depth)
    engine.add("a", 4, max_tokens=30)
    engine.add("b", 9, max_tokens=30)
    chunks = [chunk for _ in range(3) for chunk in engine.step()]
    engine.core.abort("a", index)
    chunks += engine.run()
    assert ends(chunks) == [("a", 0, "abort"), ("b", 0, "length")]
    assert [sequence.request_id for sequence in engine.drafter.ended] == ["a", "b"]
    assert len(tokens_by_choice(chunks)["b", 0]) == 30
    assert engine.core.stats().kv_blocks_used == 0


@pytest.mark.parametrize("forbidden", [False, True])
@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("kept", [0, 1, 3])
def test_an_error_within_a_draft_ends_the_sequence_after_the_kept_tokens(
    kept: int, depth: int, forbidden: bool
) -> None:
    engine = Drafted({"most": 4}, async_scheduling=depth, block_size=2)

    execute = engine.executor.execute

    def failing(plan: StepPlan) -> FakeHandle:
        handle = execute(plan)
        result = handle.step_result
        assert isinstance(result, StepResult)
        if plan.num_drafts is None or result.errors:
            return handle
        entry = int(np.argmax(plan.num_drafts))
        result.token_ids[entry, kept:] = -1
        result.num_sampled[entry] = kept
        own = frozenset([entry]) if forbidden else frozenset[int]()
        failed = dataclasses.replace(result, errors={entry: "bad"}, forbidden=own)
        return dataclasses.replace(handle, step_result=failed)

    engine.executor.execute = failing  # type: ignore[method-assign]
    engine.add("a", 8, max_tokens=30)
    chunks = engine.run()
    assert counts(chunks) == [1, kept, 0] if kept else [1, 0]
    assert (chunks[-1].finish_reason, chunks[-1].error) == ("error", "bad")
    stats = engine.core.stats()
    assert stats.num_corrupted == (0 if forbidden else 1)
    assert stats.generation_tokens == 1 + kept
    assert stats.kv_blocks_used == 0
    published = sum(map(len, engine.core._engine.cache.pool._index))
    assert (published > 0) is forbidden
