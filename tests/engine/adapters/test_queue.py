"""Slots of adapters: who gets one, who waits, and what is evicted. With a stand-in for the reading thread."""

from __future__ import annotations

from concurrent.futures import Future

import pytest

from chorale.engine.adapters.queue import PATIENCE, AdapterQueue
from chorale.engine.types import AdapterRef, GenerateRequest
from chorale.errors import AdapterError

A, B, C = (AdapterRef(number, name, f"/{name}") for number, name in enumerate("abc", 1))


class Service:
    """Placements end when the test says so."""

    def __init__(self) -> None:
        self.placements: list[tuple[AdapterRef, int, Future[None]]] = []

    def place(self, adapter: AdapterRef, slot: int) -> Future[None]:
        self.placements.append((adapter, slot, Future()))
        return self.placements[-1][2]

    load = place  # type: ignore[assignment]

    def forget(self, adapter_id: int) -> None: ...

    def close(self) -> None: ...

    def finish(self, error: Exception | None = None) -> None:
        for *_, future in self.placements:
            if not future.done():
                future.set_result(None) if error is None else future.set_exception(error)


def request(name: str, adapter: AdapterRef) -> GenerateRequest:
    return GenerateRequest(request_id=name, prompt_token_ids=[1], adapter=adapter)


class Engine:
    """An ``AdapterQueue``, and the requests that have entered."""

    def __init__(self, num_slots: int) -> None:
        self.service = Service()
        self.queue = AdapterQueue(self.service, num_slots)
        self.now = 0.0
        self.entered: list[str] = []
        self.faults: dict[str, str | None] = {}

    def add(self, name: str, adapter: AdapterRef) -> None:
        if self.queue.admit(request(name, adapter), self.now):
            self.entered.append(name)

    def step(self, *, finish: bool = True) -> list[str]:
        """Returns the requests that have entered since the last step."""
        for _ in range(2):
            for each, fault in self.queue.take_ready(self.now, wait=False):
                if fault is None:
                    self.entered.append(each.request_id)
                self.faults[each.request_id] = fault
            if finish:
                self.service.finish()
        fresh, self.entered = self.entered, []
        return fresh


def test_a_request_waits_until_its_adapter_is_placed() -> None:
    engine = Engine(2)
    engine.add("base", AdapterRef())
    engine.add("one", A)
    assert engine.step(finish=False) == ["base"]
    assert engine.step() == ["one"]
    engine.add("two", A)
    assert engine.step() == ["two"], "the adapter has a slot already"
    assert len(engine.service.placements) == 1
    assert (engine.queue.slot_of(A), engine.queue.slot_of(AdapterRef())) == (0, -1)


def test_the_adapter_used_least_recently_is_replaced() -> None:
    engine = Engine(2)
    for name, adapter in (("one", A), ("two", B)):
        engine.add(name, adapter)
    assert engine.step() == ["one", "two"]
    engine.add("three", C)
    assert engine.step() == [], "both slots are in use"
    assert engine.queue.waiting == ("c",)
    engine.add("four", A)
    assert engine.step() == ["four"], "it overtakes"
    engine.queue.release(B)
    assert engine.step() == ["three"]
    assert (engine.queue.slot_of(A), engine.queue.slot_of(C)) == (0, 1)
    assert engine.queue.running == ("a", "c")


def test_nobody_starves() -> None:
    engine = Engine(1)
    engine.add("one", A)
    assert engine.step() == ["one"]
    engine.add("two", B)
    engine.now += PATIENCE / 2
    engine.add("three", A)
    assert engine.step() == ["three"]
    engine.now += PATIENCE
    engine.add("four", A)
    assert engine.step() == [], "it may not overtake any more"
    for _ in range(2):
        engine.queue.release(A)
    assert engine.step() == ["two"]
    engine.queue.release(B)
    engine.step()
    assert engine.queue.running == ("a",)


def test_a_fault_of_an_adapter_ends_only_its_requests() -> None:
    engine = Engine(2)
    engine.add("one", A)
    engine.step(finish=False)
    engine.add("two", A)
    engine.service.finish(AdapterError("the folder is gone"))
    assert engine.step() == []
    assert all("the folder is gone" in (fault or "") for fault in engine.faults.values())
    assert set(engine.faults) == {"one", "two"}
    engine.add("three", B)
    assert engine.step() == ["three"]


def test_an_aborted_request_leaves_the_queue() -> None:
    engine = Engine(1)
    engine.add("one", A)
    assert "one" in engine.queue
    found = engine.queue.remove("one")
    assert found is not None
    assert found.adapter == A
    assert engine.queue.remove("one") is None
    assert len(engine.queue) == 0


@pytest.mark.parametrize("num_slots", [1, 3])
def test_an_adapter_that_is_forgotten_gives_its_slot_first(num_slots: int) -> None:
    engine = Engine(num_slots)
    for number in range(num_slots):
        engine.add(f"r{number}", AdapterRef(number + 1, f"n{number}", "/"))
    engine.step()
    for number in range(num_slots):
        engine.queue.release(AdapterRef(number + 1))
    last = AdapterRef(num_slots, "", "")
    engine.queue.forget(last)
    engine.add("new", AdapterRef(99, "new", "/"))
    assert engine.step() == ["new"]
    assert engine.queue.slot_of(AdapterRef(99)) == num_slots - 1
