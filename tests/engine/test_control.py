"""Pause, sleep and the prefix cache, between steps of an engine with a fake device."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import pytest

from chorale.config.seeds import choice_seed
from chorale.engine.commands import Command, DeviceControl, Outcome
from chorale.engine.core import EngineCore
from chorale.engine.types import StepPlan, TokenChunk
from chorale.errors import ConflictError
from tests.support.engine.fake_executor import FakeHandle
from tests.support.engine.integrity import check_integrity
from tests.support.engine.recording import Engine, RecordingExecutor, ends, tokens_by_choice
from tests.support.engine.simulation import Ticker

ASYNC = pytest.mark.parametrize("depth", [0, 1], ids=["sync", "async"])


class Device(RecordingExecutor, DeviceControl):  # type: ignore[misc]
    """A fake device that can sleep; it forgets rows and blocks, and no step may run meanwhile."""

    awake = frozenset({"weights", "kv_cache"})

    def why_not(self, command: Command) -> str | None:
        return None

    def execute(self, plan: StepPlan | Command) -> FakeHandle:  # type: ignore[override]
        if isinstance(plan, Command):
            self.awake = frozenset() if plan.action == "sleep" else self.awake | set(plan.tags)
            self._rows.clear()
            self._tokens[:] = -1
            self._hashes[:] = 0
            return None  # type: ignore[return-value]
        assert len(self.awake) == 2, "a step runs on a sleeping device"
        return super().execute(plan)


def make(depth: int = 0, **changes: Any) -> Engine:
    engine = Engine(async_scheduling=bool(depth), max_num_batched_tokens=8, **changes)
    device = Device(engine.limits, engine.model)
    engine.executor = device
    engine.core = EngineCore(engine.limits, device, Ticker(), device=device)
    return engine


def tell(engine: Engine, action: Any, **fields: Any) -> Future[Outcome]:
    return engine.core.control(Command(action=action, **fields))


def steps(engine: Engine, count: int) -> list[TokenChunk]:
    return [chunk for _ in range(count) for chunk in engine.step()]


def expected(engine: Engine, prompt: int, count: int, index: int = 0) -> list[int]:
    sampling = engine.add("expected", prompt, max_tokens=count).sampling
    engine.core.abort("expected")
    ids, most = list(range(10, 10 + prompt)), engine.limits.max_model_len
    return engine.model.generate(ids, sampling, choice_seed(1, index), most)[0]


@ASYNC
@pytest.mark.parametrize("before", [0, 1, 3, 6])
@pytest.mark.parametrize("action", ["pause", "sleep"])
def test_kept_requests_continue_with_the_same_tokens(action: str, before: int, depth: int) -> None:
    engine = make(depth)
    engine.add("a", 20, max_tokens=12)
    engine.add("b", 5, n=2, max_tokens=9)
    chunks = steps(engine, before)
    done = tell(engine, action, mode="keep")
    chunks += engine.run()  # commits a step in flight, then has no work
    assert done.result(0).is_paused
    num_plans = len(engine.plans)
    engine.add("late", 7, max_tokens=3)
    chunks += engine.run()
    assert len(engine.plans) == num_plans
    tell(engine, "resume" if action == "pause" else "wake_up").result(0)
    chunks += engine.run()
    found = tokens_by_choice(chunks)
    assert found["a", 0] == expected(engine, 20, 12)
    assert [found["b", index] for index in (0, 1)] == [expected(engine, 5, 9, index) for index in (0, 1)]
    assert found["late", 0] == expected(engine, 7, 3)
    check_integrity(engine.core)


@ASYNC
@pytest.mark.parametrize("action", ["pause", "sleep"])
def test_with_wait_running_requests_finish_before_the_command_is_done(action: str, depth: int) -> None:
    engine = make(depth)
    engine.add("a", 20, max_tokens=6)
    chunks = steps(engine, 2)
    done = tell(engine, action, mode="wait")
    engine.add("late", 3, max_tokens=2)
    assert not done.done()
    chunks += engine.run()
    assert ends(chunks) == [("a", 0, "length")]
    assert done.result(0).is_paused
    assert bool(engine.core.refusal) is (action == "pause")


@ASYNC
def test_with_abort_running_requests_end_at_once(depth: int) -> None:
    engine = make(depth)
    engine.add("a", 20, max_tokens=6)
    engine.add("b", 3, n=2, max_tokens=6)
    steps(engine, 2)
    done = tell(engine, "pause", mode="abort")
    assert sorted(ends(engine.run())) == [("a", 0, "abort"), ("b", 0, "abort"), ("b", 1, "abort")]
    assert done.result(0).is_paused
    assert engine.core.stats().kv_blocks_used == 0


def cached(engine: Engine) -> int:
    """Returns how many tokens of a prompt that was computed before are found in the cache."""
    engine.add("again", 21, max_tokens=1)
    return engine.run()[0].num_cached_tokens


@pytest.mark.parametrize(
    ("command", "is_kept"),
    [
        ({"action": "pause"}, False),
        ({"action": "pause", "clear_cache": False}, True),
        ({"action": "pause", "mode": "keep"}, True),
        ({"action": "sleep", "level": 0}, True),
        ({"action": "sleep", "level": 1}, False),
        ({"action": "reset_prefix_cache"}, False),
    ],
)
def test_what_the_prefix_cache_keeps(command: dict[str, Any], is_kept: bool) -> None:
    engine = make()
    engine.add("a", 21, max_tokens=1)
    engine.run()
    assert tell(engine, **command).result(0).success
    tell(engine, "wake_up")
    assert (cached(engine) > 0) is is_kept


@ASYNC
def test_the_cache_of_running_requests_is_reset_only_on_demand(depth: int) -> None:
    engine = make(depth)
    engine.add("a", 20, max_tokens=10)
    chunks = steps(engine, 5)
    assert not tell(engine, "reset_prefix_cache").result(0).success
    assert tell(engine, "reset_prefix_cache", preempt=True).result(0).success
    chunks += engine.run()
    assert tokens_by_choice(chunks)["a", 0] == expected(engine, 20, 10)
    assert engine.core.stats().num_preemptions == 1


def test_parts_of_the_memory_are_restored_in_any_order() -> None:
    engine = make()
    device: Any = engine.executor
    for first, second in (("weights", "kv_cache"), ("kv_cache", "weights")):
        assert tell(engine, "sleep", level=2).result(0) == Outcome(is_paused=True, is_sleeping=True)
        assert not device.awake
        assert tell(engine, "wake_up", tags=(first,)).result(0) == Outcome(is_paused=True, is_sleeping=True)
        assert device.awake == {first}
        assert not tell(engine, "wake_up", tags=(second,)).result(0).is_paused
    engine.add("a", 5, max_tokens=2)
    assert ends(engine.run()) == [("a", 0, "length")]


def test_commands_that_a_sleeping_engine_refuses() -> None:
    engine = make()
    tell(engine, "sleep")
    for action in ("pause", "resume", "start_profile"):
        assert isinstance(tell(engine, action).exception(0), ConflictError)
    assert tell(engine, "state").result(0).is_sleeping


def test_a_resume_ends_a_pause_that_waits() -> None:
    engine = make()
    engine.add("a", 5, max_tokens=5)
    done = tell(engine, "pause", mode="wait")
    assert not tell(engine, "resume").result(0).is_paused
    assert isinstance(done.exception(0), ConflictError)
    assert ends(engine.run()) == [("a", 0, "length")]


def test_a_request_that_is_held_back_can_be_aborted() -> None:
    engine = make()
    tell(engine, "pause", mode="keep")
    engine.add("a", 5, n=2, max_tokens=5)
    assert engine.core.stats().num_waiting == 1
    engine.core.abort("a")
    assert ends(engine.run()) == [("a", 0, "abort"), ("a", 1, "abort")]
    assert engine.core.stats().num_waiting == 0


@pytest.mark.parametrize("command", [{"action": "sleep"}, {"action": "start_profile"}])
def test_without_its_option_a_command_is_refused_and_requests_run_on(command: dict[str, Any]) -> None:
    engine = Engine()
    engine.add("a", 5, max_tokens=5)
    engine.step()
    assert isinstance(tell(engine, **command).exception(0), ConflictError)
    assert ends(engine.run()) == [("a", 0, "length")]
