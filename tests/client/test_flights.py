"""Admission, delivery and the estimate of the wait, without sockets and with a clock of our own."""

from __future__ import annotations

import pytest

from chorale.client.flights import RETRY_AFTER_MAX, Flights
from chorale.engine.types import GenerateRequest, SamplingSpec, TokenChunk
from chorale.errors import QueueFullError, RequestError


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def asked(name: str, n: int = 1) -> GenerateRequest:
    return GenerateRequest(request_id=name, prompt_token_ids=[1], sampling=SamplingSpec(n=n))


def no_close(request_id: str, index: int | None) -> None:
    raise AssertionError(request_id)


def test_choices_are_counted_until_each_has_ended() -> None:
    flights = Flights(Clock())
    stream = flights.admit(asked("a", 3), no_close)
    assert flights.num_in_flight == 3
    flights.deliver([TokenChunk("a", 0, [5]), TokenChunk("a", 1, [6], finish_reason="stop")])
    assert flights.num_in_flight == 2
    assert "a" in flights
    flights.deliver([TokenChunk("a", i, [], finish_reason="length") for i in (0, 2)])
    assert flights.num_in_flight == 0
    assert "a" not in flights
    assert stream.num_unfinished == 0
    flights.deliver([TokenChunk("a", 0, [9])])  # late: dropped
    assert stream.num_pending_tokens == 2


def test_abort_ends_only_the_choices_that_are_open() -> None:
    flights = Flights(Clock())
    stream = flights.admit(asked("a", 2), no_close)
    flights.deliver([TokenChunk("a", 0, [5], finish_reason="stop")])
    assert flights.abort("a")
    assert not flights.abort("a")
    assert flights.num_in_flight == 0
    assert stream.num_unfinished == 0


def test_one_choice_can_be_left() -> None:
    flights, left = Flights(Clock()), list[tuple[str, int | None]]()

    def on_close(request_id: str, index: int | None) -> None:
        left.append((request_id, index))
        assert flights.leave(request_id, index)

    stream = flights.admit(asked("a", 3), on_close)
    stream.drop(1)
    stream.drop(1)
    flights.deliver([TokenChunk("a", 1, [5, 5, 5]), TokenChunk("a", 1, [], finish_reason="abort")])
    assert stream.num_pending_tokens == 0
    assert (flights.num_in_flight, stream.num_unfinished) == (2, 2)
    flights.deliver([TokenChunk("a", 0, [5], finish_reason="stop")])
    stream.drop(0)  # it has ended: nobody is told
    assert left == [("a", 1)]
    stream.drop(2)
    assert "a" not in flights
    assert (flights.num_in_flight, stream.num_unfinished) == (0, 0)
    assert not flights.leave("a", 2)
    assert not flights.leave("a", None)


def test_capacity_counts_choices_and_more_than_that_can_never_fit() -> None:
    flights = Flights(Clock())
    flights.set_capacity(4)
    flights.admit(asked("a", 4), no_close)
    with pytest.raises(QueueFullError):
        flights.admit(asked("b"), no_close)
    for num_in_flight in (4, 0):  # whether the server is busy or idle
        with pytest.raises(RequestError, match=r"5 choices in all.* at most 4") as refused:
            flights.admit(asked("c", 5), no_close)
        assert (refused.value.status, refused.value.param) == (400, "n")
        assert flights.num_in_flight == num_in_flight
        flights.remove("a")


def test_a_request_of_several_parts_is_admitted_as_a_whole() -> None:
    flights = Flights(Clock())
    flights.set_capacity(6)
    parts = {"a": 2, "b": 2, "c": 2}
    flights.reserve(parts)
    with pytest.raises(QueueFullError):  # the places are taken before anything is submitted
        flights.admit(asked("other"), no_close)
    flights.admit(asked("a", 2), no_close)
    assert (flights.num_in_flight, flights.num_admitted) == (2, 6)
    flights.release(parts)
    flights.release(parts)
    assert flights.num_admitted == 2  # "a" is in flight, and its place is not given back twice
    with pytest.raises(QueueFullError):
        flights.reserve({"d": 3, "e": 2})
    assert flights.num_admitted == 2  # nothing of it was kept
    with pytest.raises(RequestError) as refused:
        flights.reserve({"d": 4, "e": 3})
    assert (refused.value.status, refused.value.param) == (400, "prompt")


def test_processes_share_the_capacity_and_an_idle_one_admits_what_the_server_can_hold() -> None:
    flights = Flights(Clock())
    flights.set_capacity(8, num_processes=2)
    flights.admit(asked("a"), no_close)
    with pytest.raises(QueueFullError):
        flights.admit(asked("b", 4), no_close)
    flights.admit(asked("c", 3), no_close)
    flights.remove("a")
    flights.remove("c")
    flights.reserve({"d": 4, "e": 4})  # idle: admitted whole, beyond the share of four
    flights.release(["d", "e"])
    with pytest.raises(RequestError, match="at most 8"):
        flights.reserve({"d": 4, "e": 5})


def test_retry_after_follows_the_completion_rate() -> None:
    clock = Clock()
    flights = Flights(clock)
    flights.set_capacity(100)
    for i in range(100):
        flights.admit(asked(f"r{i}"), no_close)
    for _ in range(40):  # two choices end, and two come, each second
        for step in range(2):
            flights.deliver([TokenChunk("r0", 0, [], finish_reason="stop")])
            flights.admit(asked("r0"), no_close)
            clock.now += 0.5
            flights.tick()
            assert step in (0, 1)
    assert flights.retry_after(10) == pytest.approx(5.0, rel=0.01)
    assert flights.retry_after(1) == 1.0  # never less than a second
    for _ in range(60):  # nothing ends any more
        clock.now += 1.0
        flights.tick()
    assert flights.retry_after(10) == RETRY_AFTER_MAX


def test_a_slow_reader_is_one_that_stays_behind() -> None:
    clock = Clock()
    flights = Flights(clock)
    flights.admit(asked("slow"), no_close)
    reads = flights.admit(asked("reads"), no_close)
    for name in ("slow", "reads"):
        flights.deliver([TokenChunk(name, 0, list(range(100)))])
    assert flights.slow_readers(50, 60.0) == []
    clock.now += 59.0
    reads._pending.clear()  # what a read does
    assert flights.slow_readers(50, 60.0) == []
    clock.now += 1.0
    flights.deliver([TokenChunk("reads", 0, list(range(100)))])
    assert flights.slow_readers(50, 60.0) == ["slow"]
