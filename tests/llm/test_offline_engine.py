"""OfflineEngine with a fake device: steps in the caller's thread, signals, errors and idle time."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from chorale.client.base import EngineInfo
from chorale.engine.commands import Command
from chorale.engine.core import EngineCore
from chorale.engine.types import (
    EngineLimits,
    FetchResult,
    GenerateRequest,
    SamplingSpec,
    StepPlan,
    TokenChunk,
)
from chorale.errors import EngineDeadError, EngineError
from chorale.llm import engine as module
from chorale.llm.engine import OfflineEngine
from chorale.machine import processes
from chorale.machine.processes import tune_garbage_collector
from tests.support.engine.fake_executor import FakeExecutor
from tests.support.event_loop import wait_until

LIMITS = EngineLimits(
    num_blocks=400,
    block_size=4,
    max_num_seqs=4,
    max_num_batched_tokens=32,
    max_model_len=256,
    sliding_window=8,
    async_scheduling=True,
)
INFO = EngineInfo(model="fake", max_model_len=256, max_num_seqs=4)


class Device(FakeExecutor):
    """Calls ``before_step``, which may raise, and prepares ``pieces`` pieces in idle time."""

    pieces = 0

    def __init__(self) -> None:
        super().__init__(LIMITS)
        self.before_step: Callable[[int], None] = lambda step: None

    def execute(self, plan: StepPlan) -> FetchResult:
        self.before_step(plan.step_id)
        return super().execute(plan)

    def use_idle_time(self) -> bool:
        self.pieces -= 1
        return self.pieces > 0


@pytest.fixture
def device() -> Device:
    return Device()


@pytest.fixture
def engine(device: Device) -> Iterator[OfflineEngine]:
    made = OfflineEngine(EngineCore(LIMITS, device), INFO)
    yield made
    made.close()


def requests(count: int, max_tokens: int = 20, prefix: str = "") -> list[GenerateRequest]:
    sampling = SamplingSpec(max_tokens=max_tokens, ignore_eos=True, seed=1)
    return [
        GenerateRequest(request_id=f"{prefix}{index}", prompt_token_ids=[1, 2, index], sampling=sampling)
        for index in range(count)
    ]


def run(engine: OfflineEngine, work: list[GenerateRequest]) -> list[TokenChunk]:
    found: list[TokenChunk] = []

    def take(chunks: list[TokenChunk]) -> list[tuple[str, int]]:
        found.extend(chunks)
        return []

    engine.run(work, take)
    return found


def num_tokens(chunks: list[TokenChunk]) -> int:
    return sum(len(chunk.token_ids) for chunk in chunks)


def assert_usable(engine: OfflineEngine) -> None:
    assert num_tokens(run(engine, requests(6))) == 120
    assert engine.stats.kv_blocks_used == 0


def test_steps_run_in_the_callers_thread(engine: OfflineEngine, device: Device) -> None:
    threads = set()
    device.before_step = lambda _: threads.add(threading.get_ident())
    assert num_tokens(run(engine, requests(10))) == 200
    assert threads == {threading.get_ident()}


def test_a_choice_that_take_returns_is_aborted(engine: OfflineEngine) -> None:
    found: list[TokenChunk] = []

    def take(chunks: list[TokenChunk]) -> list[tuple[str, int]]:
        found.extend(chunks)
        return [("1", 0)]

    engine.run(requests(3), take)
    assert {chunk.request_id: chunk.finish_reason for chunk in found if chunk.finish_reason} == {
        "0": "length",
        "1": "abort",
        "2": "length",
    }
    assert_usable(engine)


def test_an_interrupt_acts_between_two_steps_and_leaves_the_engine_usable(
    engine: OfflineEngine, device: Device
) -> None:
    inside: list[bool] = []

    def interrupt(step: int) -> None:
        if step == 5:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0)  # a handler called within the step would raise here
            inside.append(True)

    device.before_step = interrupt
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        run(engine, requests(6))
    assert inside == [True]
    assert signal.getsignal(signal.SIGINT) is handler
    device.before_step = lambda step: None
    assert_usable(engine)


def test_handlers_run_in_the_order_of_the_signals(engine: OfflineEngine, device: Device) -> None:
    seen: list[int] = []
    numbers = (signal.SIGUSR2, signal.SIGUSR1)
    before = [signal.signal(number, lambda number, _: seen.append(number)) for number in numbers]

    def send(step: int) -> None:
        for number in numbers if step == 3 else ():
            os.kill(os.getpid(), number)
            time.sleep(0.01)

    try:
        device.before_step = send
        assert num_tokens(run(engine, requests(2))) == 40
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
    assert seen == list(numbers)


def test_a_handler_that_is_set_during_a_call_stays(engine: OfflineEngine) -> None:
    def handler(number: int, _: object) -> None:
        raise AssertionError(number)

    def take(chunks: list[TokenChunk]) -> list[tuple[str, int]]:
        signal.signal(signal.SIGUSR1, handler)
        return []

    before = signal.signal(signal.SIGUSR1, lambda *_: None)
    try:
        engine.run(requests(1), take)
        assert signal.getsignal(signal.SIGUSR1) is handler
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_second_interrupt_ends_a_step_that_hangs(engine: OfflineEngine, device: Device) -> None:
    def hang(step: int) -> None:
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.01)
        raise AssertionError("the second interrupt did nothing")

    device.before_step = hang
    with pytest.raises(KeyboardInterrupt):
        run(engine, requests(1))
    with pytest.raises(EngineDeadError, match="KeyboardInterrupt in the middle of a step"):
        run(engine, requests(1))


def test_a_failed_call_leaves_no_requests_for_the_next(engine: OfflineEngine) -> None:
    """No row, page or chunk remains of its first rounds or of a later one."""
    (later,) = requests(1, max_tokens=200, prefix="later")
    num_taken = 0

    def take(chunks: list[TokenChunk]) -> list[GenerateRequest]:
        nonlocal num_taken
        num_taken += 1
        if num_taken == 8:
            raise ValueError("raised by take")
        return [later] if num_taken == 1 else []

    with pytest.raises(ValueError, match="raised by take"):
        engine.run(requests(2, max_tokens=200), take)
    stats = engine.stats
    assert (stats.num_running, stats.num_waiting, stats.kv_blocks_used) == (0, 0, 0)
    assert stats.generation_tokens < 50, "the aborted requests ran to their end"
    assert {chunk.request_id for chunk in run(engine, requests(3, prefix="mine"))} == {
        "mine0",
        "mine1",
        "mine2",
    }


@pytest.mark.parametrize("error", [EngineError("the device is on fire"), RuntimeError("on fire")])
def test_every_call_after_a_failure_raises_its_reason(
    engine: OfflineEngine, device: Device, error: Exception
) -> None:
    def fail(step: int) -> None:
        if step == 3:
            raise error

    device.before_step = fail
    for _ in range(2):
        with pytest.raises(EngineDeadError, match=r"the engine failed: .*on fire"):
            run(engine, requests(3))


def test_a_call_from_another_thread_waits_for_the_first(engine: OfflineEngine, device: Device) -> None:
    running, others = set[threading.Thread](), list[int]()

    def look(_: int) -> None:
        running.add(threading.current_thread())
        assert engine._owner == threading.get_ident()
        time.sleep(0.0005)

    device.before_step = look
    threads = [
        threading.Thread(target=lambda: others.append(num_tokens(run(engine, requests(3)))), daemon=True)
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    assert num_tokens(run(engine, requests(3))) == 60
    for thread in threads:
        thread.join(60)
    assert others == [60] * 3
    assert len(running) == 4


def test_a_call_from_within_a_call_is_an_error(engine: OfflineEngine) -> None:
    state = Command(action="state")
    for again in (lambda: run(engine, requests(1)), engine.close, lambda: engine.control(state)):

        def take(chunks: list[TokenChunk], again: Callable[[], object] = again) -> list[tuple[str, int]]:
            again()
            return []

        with pytest.raises(RuntimeError, match="from within a call"):
            engine.run(requests(2), take)
    assert_usable(engine)


def test_closing_from_another_thread_fails_running_requests(engine: OfflineEngine, device: Device) -> None:
    begun = threading.Event()

    def slow(_: int) -> None:
        begun.set()
        time.sleep(0.005)

    device.before_step = slow
    closer = threading.Thread(target=lambda: (begun.wait(60), engine.close()), daemon=True)
    closer.start()
    with pytest.raises(EngineDeadError, match="shut down"):
        run(engine, requests(4, max_tokens=200))
    closer.join(60)
    assert device.num_shutdowns == 1
    with pytest.raises(EngineDeadError, match="shut down"):
        run(engine, requests(1))
    engine.close()
    assert device.num_shutdowns == 1


def test_idle_time_is_used_until_there_is_nothing_to_prepare(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_QUIET", 0.01)
    device = Device()
    device.pieces = 5
    made = OfflineEngine(EngineCore(LIMITS, device), INFO)
    try:
        for wanted in (0, -1):  # after the run it asks once more whether work is left
            wait_until(lambda wanted=wanted: device.pieces <= wanted, "the pieces")
            time.sleep(0.05)
            assert device.pieces == wanted
            assert num_tokens(run(made, requests(1))) == 20
    finally:
        made.close()


def test_a_call_interrupts_the_use_of_idle_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The remaining pieces are prepared some time after the call, not right after it."""
    monkeypatch.setattr(module, "_QUIET", 0.01)

    class Endless(Device):
        num_prepared = 0

        def use_idle_time(self) -> bool:
            self.num_prepared += 1
            return True

    device = Endless()
    made = OfflineEngine(EngineCore(LIMITS, device), INFO)
    try:
        wait_until(lambda: device.num_prepared >= 3, "three pieces")
        module._QUIET = 600.0
        run(made, requests(1))
        before = device.num_prepared
        time.sleep(0.2)
        assert device.num_prepared == before
    finally:
        made.close()


def test_idle_time_is_not_used_after_closing(device: Device, engine: OfflineEngine) -> None:
    """This holds even if the thread was about to begin a piece when the engine was closed."""
    device.pieces = 5
    engine.close()
    assert not engine._prepare_piece()
    assert device.pieces == 5


def test_the_call_after_an_error_in_idle_time_raises_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_QUIET", 0.01)
    failed = threading.Event()

    class Broken(Device):
        def use_idle_time(self) -> bool:
            failed.set()
            raise EngineError("no graph")

    made = OfflineEngine(EngineCore(LIMITS, Broken()), INFO)
    assert failed.wait(30)
    with pytest.raises(EngineDeadError, match="no graph"):
        run(made, requests(1))
    made.close()


@pytest.fixture
def default_collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Unfreezes all, and sets a low threshold. Full collections of the tests' heap would take seconds."""
    monkeypatch.setattr(processes, "_TUNED", threading.Event())
    gc.unfreeze()
    gc.set_threshold(700, 10, 10_000)
    yield
    tune_garbage_collector()


@pytest.mark.usefixtures("default_collector")
def test_objects_that_the_program_has_frozen_stay_frozen(engine: OfflineEngine) -> None:
    gc.freeze()
    count = gc.get_freeze_count()
    run(engine, requests(1))
    assert gc.get_freeze_count() > 0.9 * count  # some objects may have been freed


@pytest.mark.usefixtures("default_collector")
def test_a_run_restores_the_garbage_collector(engine: OfflineEngine, device: Device) -> None:
    during: list[tuple[int, int]] = []

    def look(_: object) -> None:
        if len(during) < 3:  # counting visits every object of the tests' heap
            during.append((gc.get_threshold()[0], gc.get_freeze_count()))

    device.before_step = look
    before = gc.get_threshold(), gc.get_freeze_count()
    run(engine, requests(1))
    assert min(during)[0] > before[0][0]
    assert min(count for _, count in during) > 0
    assert (gc.get_threshold(), gc.get_freeze_count()) == before
