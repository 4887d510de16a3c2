"""HostSlots: least recent use, pins, and the log of what comes and goes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from chorale.engine.kv_cache.host_slots import HostSlots
from chorale.engine.types import CacheGroup

FULL, WINDOW = CacheGroup.FULL, CacheGroup.WINDOW
CALLS = ("take", "touch", "forget", "pin", "unpin", "clear")


class Log:
    """The index, as its log tells it."""

    def __init__(self) -> None:
        self.there: set[tuple[CacheGroup, bytes]] = set()

    def stored(
        self, group: CacheGroup, hashes: Sequence[bytes], parent: bytes | None, token_ids: Any, medium: str
    ) -> None:
        assert (parent, len(token_ids), medium) == (None, 0, "CPU")
        for each in hashes:
            assert (group, each) not in self.there
            self.there.add((group, each))

    def removed(self, group: CacheGroup, hashes: Sequence[bytes], medium: str) -> None:
        assert medium == "CPU"
        for each in hashes:
            self.there.remove((group, each))


def test_the_longest_unused_is_replaced() -> None:
    slots = HostSlots(3)
    assert [slots.take(FULL, name) for name in (b"a", b"b", b"c")] == [0, 1, 2]
    slots.touch(0)
    assert slots.take(WINDOW, b"a") == 1
    assert slots.find(FULL, b"b") is None
    assert (slots.find(FULL, b"a"), slots.find(WINDOW, b"a")) == (0, 1)
    slots.pin(2)
    slots.pin(2)
    assert [slots.take(FULL, name) for name in (b"d", b"e")] == [0, 1]
    slots.unpin(2)
    assert slots.take(FULL, b"f") == 0
    slots.unpin(2)
    assert slots.take(FULL, b"g") == 1, "a slot that was in use until now is replaced last"
    for slot in (0, 1, 2):
        slots.pin(slot)
    assert slots.take(FULL, b"h") is None


def test_a_pinned_page_that_is_forgotten_is_free_afterwards() -> None:
    slots = HostSlots(1)
    slots.take(FULL, b"a")
    slots.pin(0)
    slots.forget(FULL, b"a")
    assert slots.find(FULL, b"a") is None
    assert slots.take(FULL, b"b") is None
    slots.unpin(0)
    assert slots.take(FULL, b"b") == 0


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(CALLS), st.integers(0, 9))))
def test_the_log_replays_to_the_index(calls: list[tuple[str, int]]) -> None:
    log, pinned = Log(), list[int]()
    slots = HostSlots(4, log)  # type: ignore[arg-type]
    for call, number in calls:
        group, name = CacheGroup(number % 2), bytes([number])
        slot = slots.find(group, name)
        if call == "take" and slot is None:
            slots.take(group, name)
        elif call == "touch" and slot is not None:
            slots.touch(slot)
        elif call == "forget":
            slots.forget(group, name)
        elif call == "pin" and slot is not None:
            slots.pin(slot)
            pinned.append(slot)
        elif call == "unpin" and pinned:
            slots.unpin(pinned.pop())
        elif call == "clear":
            slots.clear()
            log.there.clear()  # the caller records that
        assert log.there == {(group, name) for group in CacheGroup for name in slots.published(group)}
