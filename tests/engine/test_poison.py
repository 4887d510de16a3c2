"""Keys and values that are not numbers: who ends because of them, and that nobody is served them again."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from chorale.engine.core import EngineCore
from chorale.engine.drafts.planner import HostDrafter
from chorale.engine.engine_state import Drafter
from chorale.engine.sequence import Sequence
from chorale.engine.types import (
    CacheGroup,
    EngineLimits,
    GenerateRequest,
    IntArray,
    StepPlan,
    StepResult,
)
from tests.support.engine.fake_executor import FakeExecutor, FakeModel, FakeRow
from tests.support.engine.recording import Engine, ends, tokens_by_choice
from tests.support.engine.simulation import Ticker

POISON = 999


class PoisonedDevice(FakeExecutor):
    """``num_faults`` times the keys and values of POISON become NaN; so do all that attend to them."""

    def __init__(self, limits: EngineLimits, model: FakeModel, num_faults: int) -> None:
        super().__init__(limits, model)
        self.num_faults = num_faults
        self._nan = np.zeros((limits.num_blocks, limits.block_size), np.bool_)
        self._bad_rows: set[int] = set()

    def _write(self, state: FakeRow, tokens: IntArray, computed: int) -> None:
        super()._write(state, tokens, computed)
        bad = np.zeros(len(tokens), np.bool_)
        if (tokens == POISON).any() and self.num_faults:
            self.num_faults -= 1
            bad |= tokens == POISON
        if computed:
            bad[0] |= self._nan[self._slots(state, CacheGroup.FULL, 0, computed)].any()
        bad = np.logical_or.accumulate(bad)
        for group in CacheGroup:
            self._nan[self._slots(state, group, computed, computed + len(tokens))] = bad

    def _sample(self, state: FakeRow, length: int) -> int:
        if self._nan[self._slots(state, CacheGroup.FULL, 0, length)].any():
            self._bad_rows.add(state.start.row)
        return super()._sample(state, length)

    def _run(self, plan: StepPlan) -> StepResult:
        self._bad_rows.clear()
        result = super()._run(plan)
        for entry, row in enumerate(plan.rows.tolist()):
            if row in self._bad_rows:
                result.token_ids[entry] = -1
                result.num_sampled[entry] = 0
                result.errors[entry] = "no finite logits"
        return result


class Poisoned(Engine):
    def __init__(self, num_faults: int, depth: int, drafter: Drafter | None = None) -> None:
        super().__init__(async_scheduling=depth)
        self.device = PoisonedDevice(self.limits, self.model, num_faults)
        self.core = EngineCore(self.limits, self.device, Ticker(), drafter=drafter)

    def add(self, name: str, prompt: list[int] | int, **fields: Any) -> GenerateRequest:
        return super().add(name, prompt, max_tokens=12, **fields)

    def wanted(self, request: GenerateRequest) -> list[int]:
        return self.model.generate(request.prompt_token_ids, request.sampling, 1, 200)[0]


GOOD_START = list(range(10, 22))


@pytest.mark.parametrize("depth", [0, 1])
def test_a_poisoned_prefix_is_never_served_again(depth: int) -> None:
    engine = Poisoned(num_faults=1, depth=depth)
    prompt = [*GOOD_START, POISON, *range(30, 60)]
    engine.add("hit", prompt)
    neighbour = engine.add("neighbour", list(range(100, 140)))
    chunks = engine.run()
    assert [end for end in ends(chunks) if end[0] == "hit"] == [("hit", 0, "error")]
    assert tokens_by_choice(chunks)["neighbour", 0] == engine.wanted(neighbour)
    again = engine.add("again", prompt)
    chunks = engine.run()
    assert ends(chunks) == [("again", 0, "length")]
    assert tokens_by_choice(chunks)["again", 0] == engine.wanted(again)
    assert engine.core.stats().kv_blocks_used == 0


@pytest.mark.parametrize("depth", [0, 1])
def test_sequences_that_share_a_poisoned_prefix_fail_and_remove_it(depth: int) -> None:
    """The prompt is published chunk by chunk, before anything of it was sampled."""
    engine = Poisoned(num_faults=1, depth=depth)
    prompt = [*GOOD_START, POISON, *range(30, 60)]
    engine.add("first", prompt, n=3)
    chunks = engine.core.step() + engine.core.step()  # at least the poisoned chunk is computed
    engine.add("adopts", [*prompt, 61, 62, 63, 64, 65])
    chunks += engine.run()
    assert ("first", 0, "error") in ends(chunks)
    for number in range(3):
        request = engine.add(f"later{number}", [*prompt, 61, 62, 63, 64, 65])
        chunks = engine.run()
    assert ends(chunks) == [("later2", 0, "length")]
    assert tokens_by_choice(chunks)["later2", 0] == engine.wanted(request)


def test_a_fault_while_decoding_removes_blocks_that_left_the_window() -> None:
    engine = Poisoned(num_faults=0, depth=0)
    request = engine.add("a", GOOD_START)
    for _ in range(6):
        engine.core.step()
    engine.device._nan[:] = True  # whatever the blocks hold is lost
    chunks = engine.run()
    assert ends(chunks) == [("a", 0, "error")]
    engine.device._nan[:] = False
    pool = engine.core._engine.cache.pool
    assert len(pool._cached) == 0
    again = engine.add("b", GOOD_START)
    chunks = engine.run()
    assert tokens_by_choice(chunks)["b", 0] == engine.wanted(again) == engine.wanted(request)


class ProposesPoison(HostDrafter):
    def propose(self, sequence: Sequence, most: int) -> IntArray:
        return np.full(min(most, 3), POISON, np.int32)

    def end(self, sequence: Sequence) -> None:
        return None


@pytest.mark.parametrize("depth", [0, 1])
def test_a_rejected_draft_leaves_no_nan(depth: int) -> None:
    """Keys and values of each draft are NaN. The next tokens overwrite them before anybody reads them."""
    engine = Poisoned(1000, depth, ProposesPoison())
    requests = [engine.add(name, [ord(name), *GOOD_START]) for name in "abc"]
    chunks = engine.run()
    assert engine.device.num_faults < 990
    for request in requests:
        assert tokens_by_choice(chunks)[request.request_id, 0] == engine.wanted(request)
