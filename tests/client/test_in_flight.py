"""Admission, delivery and ``retry_after``, without sockets and with a fake clock."""

from __future__ import annotations

import pytest

from chorale.client.admission import RETRY_AFTER_MAX, Admission, capacity
from chorale.client.in_flight import InFlightRequests
from chorale.client.stream import RequestStream
from chorale.config.engine import ServerConfig
from chorale.engine.types import NOBODY, GenerateRequest, Owner, SamplingSpec, TokenChunk
from chorale.errors import ConflictError, EngineDeadError, OverloadedError, QueueFullError


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def asked(name: str, n: int = 1, owner: Owner = NOBODY) -> GenerateRequest:
    return GenerateRequest(request_id=name, prompt_token_ids=[1], sampling=SamplingSpec(n=n), owner=owner)


def no_close(request_id: str, index: int | None) -> None:
    raise AssertionError(request_id)


def test_an_id_belongs_to_one_request_at_a_time() -> None:
    in_flight = InFlightRequests(Clock())
    in_flight.admit(asked("a"), no_close)
    with pytest.raises(ConflictError):
        in_flight.admit(asked("a"), no_close)
    in_flight.deliver([TokenChunk("a", 0, [], finish_reason="stop")])
    in_flight.admit(asked("a"), no_close)


def test_abort_ends_only_the_choices_that_are_open() -> None:
    in_flight = InFlightRequests(Clock())
    stream = in_flight.admit(asked("a", 2), no_close)
    in_flight.deliver([TokenChunk("a", 0, [5], finish_reason="stop")])
    assert in_flight.abort("a")
    assert not in_flight.abort("a")
    assert in_flight.num_in_flight == 0
    assert stream.num_unfinished == 0


def test_a_consumer_can_drop_one_choice() -> None:
    in_flight, left = InFlightRequests(Clock()), list[tuple[str, int | None]]()

    def on_close(request_id: str, index: int | None) -> None:
        left.append((request_id, index))
        assert in_flight.leave(request_id, index)

    stream = in_flight.admit(asked("a", 3), on_close)
    stream.drop(1)
    stream.drop(1)
    in_flight.deliver([TokenChunk("a", 1, [5, 5, 5]), TokenChunk("a", 1, [], finish_reason="abort")])
    assert stream.num_pending_tokens == 0
    assert (in_flight.num_in_flight, stream.num_unfinished) == (2, 2)
    in_flight.deliver([TokenChunk("a", 0, [5], finish_reason="stop")])
    stream.drop(0)  # no callback: the choice has ended
    assert left == [("a", 1)]
    stream.drop(2)
    assert "a" not in in_flight
    assert (in_flight.num_in_flight, stream.num_unfinished) == (0, 0)
    assert not in_flight.leave("a", 2)
    assert not in_flight.leave("a", None)


def limited(**limits: int) -> InFlightRequests:
    """Limits of a server whose engines run 4 choices at once."""
    queue = ServerConfig(**limits)
    in_flight = InFlightRequests(Clock(), Admission(Clock(), queue))
    in_flight.admission.set_capacity(capacity(queue, 4))
    return in_flight


@pytest.mark.parametrize(
    ("limits", "num_admitted", "status", "code"),
    [
        ({}, 20, 429, "rate_limit_exceeded"),
        ({"max_num_queued_reqs": 3}, 3, 503, "max_num_queued_reqs"),
        ({"max_num_queued_reqs": 30}, 30, 503, "max_num_queued_reqs"),  # instead of the default of 20
        ({"max_num_queued_reqs": 30, "max_queued_requests": 2}, 6, 429, "rate_limit_exceeded"),
        ({"max_num_queued_reqs": 5, "max_queued_requests": 2}, 5, 503, "max_num_queued_reqs"),
        ({"max_num_queued_reqs": 6, "api_server_count": 2}, 3, 503, "max_num_queued_reqs"),
        ({"max_num_queued_reqs": 0}, 0, 503, "max_num_queued_reqs"),
        ({"max_num_queued_tokens": 3}, 3, 503, "max_num_queued_tokens"),  # prompts of one token
        ({"max_num_queued_tokens": 6, "api_server_count": 2}, 3, 503, "max_num_queued_tokens"),
        ({"max_num_queued_tokens": 0}, 0, 503, "max_num_queued_tokens"),
    ],
)
def test_each_limit_has_its_answer(limits: dict[str, int], num_admitted: int, status: int, code: str) -> None:
    in_flight = limited(**limits)
    for number in range(num_admitted):
        in_flight.admit(asked(str(number)), no_close)
    with pytest.raises(QueueFullError) as refused:
        in_flight.admit(asked("more"), no_close)
    assert (refused.value.status, refused.value.code) == (status, code)
    assert refused.value.retry_after == 1.0


@pytest.mark.parametrize("end", ["token", "abort", "leave", "drop", "fail"])
def test_a_prompt_counts_until_its_first_token_or_its_end(end: str) -> None:
    in_flight = limited(max_num_queued_tokens=1)
    in_flight.admit(asked("a", 2), no_close)
    with pytest.raises(OverloadedError):
        in_flight.admission.reserve({"b": 1})
    if end == "token":
        in_flight.deliver([TokenChunk("a", 1, [5])])
    elif end == "fail":
        in_flight.fail_all(lambda: EngineDeadError("gone"))
    elif end == "abort":
        in_flight.abort("a")
    elif end == "leave":
        in_flight.leave("a", None)
    else:
        in_flight.leave("a", 0)
        in_flight.leave("a", 1)
    in_flight.admission.reserve({"b": 1})
    in_flight.abort("a")
    assert in_flight.admission.num_prompt_tokens == 0


def num_admitted(in_flight: InFlightRequests, owner: Owner, n: int = 1) -> int:
    """Admits requests of an owner until one is refused. Returns how many were admitted."""
    for number in range(100):
        try:
            in_flight.admit(asked(f"{owner.name}{number}", n, owner), no_close)
        except QueueFullError:
            return number
    raise AssertionError("no limit")


def test_an_owner_has_its_share_of_a_full_queue() -> None:
    in_flight, (a, b, c) = InFlightRequests(Clock()), (Owner(name) for name in "abc")
    in_flight.admission.set_capacity(12)
    assert [num_admitted(in_flight, each) for each in (a, b, c)] == [12, 6, 4]
    with pytest.raises(QueueFullError):
        in_flight.admission.reserve({"d": 1}, a)
    for number in range(9):
        in_flight.remove(f"a{number}")
    in_flight.admission.reserve({"d": 1}, a)  # less than its share, though 13 are admitted
    in_flight.admission.release(["d"])
    for owner, count in ((a, 12), (b, 6), (c, 4)):
        for number in range(count):
            in_flight.remove(f"{owner.name}{number}")
    assert in_flight.admission.num_admitted == 0
    assert num_admitted(in_flight, b) == 12  # owners without requests have no share


def test_shares_are_proportional_to_weights_and_at_least_one() -> None:
    in_flight, heavy = InFlightRequests(Clock()), Owner("heavy", 3.0)
    in_flight.admission.set_capacity(8)
    assert num_admitted(in_flight, Owner("a")) == 8
    assert num_admitted(in_flight, heavy) == 6
    light = Owner("light", 0.01)
    assert num_admitted(in_flight, light) == 1
    with pytest.raises(QueueFullError):
        in_flight.admit(asked("two", 2, Owner("x", 0.01)), no_close)


def test_retry_after_follows_the_completion_rate() -> None:
    clock = Clock()
    in_flight = InFlightRequests(clock)
    in_flight.admission.set_capacity(100)
    for i in range(100):
        in_flight.admit(asked(f"r{i}"), no_close)
    for _ in range(40):  # two choices end and two are admitted each second
        for step in range(2):
            in_flight.deliver([TokenChunk("r0", 0, [], finish_reason="stop")])
            in_flight.admit(asked("r0"), no_close)
            clock.now += 0.5
            in_flight.admission.tick()
            assert step in (0, 1)
    assert in_flight.admission.retry_after(10) == pytest.approx(5.0, rel=0.01)
    assert in_flight.admission.retry_after(1) == 1.0  # never less than a second
    for _ in range(60):  # no more choices end
        clock.now += 1.0
        in_flight.admission.tick()
    assert in_flight.admission.retry_after(10) == RETRY_AFTER_MAX


def test_a_reader_is_slow_if_it_has_been_behind_for_the_whole_patience() -> None:
    clock = Clock()
    in_flight = InFlightRequests(clock)
    in_flight.admit(asked("slow"), no_close)
    reads = in_flight.admit(asked("reads"), no_close)
    for name in ("slow", "reads"):
        in_flight.deliver([TokenChunk(name, 0, list(range(100)))])
    assert in_flight.slow_readers(50, 60.0) == []
    clock.now += 59.0
    reads._pending.clear()  # as by a read
    assert in_flight.slow_readers(50, 60.0) == []
    clock.now += 1.0
    in_flight.deliver([TokenChunk("reads", 0, list(range(100)))])
    assert in_flight.slow_readers(50, 60.0) == ["slow"]


async def test_chunks_that_arrived_before_a_failure_are_read_before_the_error() -> None:
    stream = RequestStream("r", 1, lambda *_: None)
    stream.push(TokenChunk("r", 0, [5]))
    stream.fail(EngineDeadError("gone"))
    assert [chunk.token_ids for chunk in await anext(stream)] == [[5]]
    for _ in range(2):
        with pytest.raises(EngineDeadError):
            await anext(stream)
