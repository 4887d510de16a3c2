"""HostSlots: least recent use, pins, and the log of what comes and goes."""

from __future__ import annotations

from chorale.engine.kv_cache.host_slots import HostSlots
from chorale.engine.kv_cache.index_log import BlocksRemoved, IndexLog
from chorale.engine.types import CacheGroup

FULL, WINDOW = CacheGroup.FULL, CacheGroup.WINDOW


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
    log = IndexLog()
    log.is_on = True
    slots = HostSlots(1, log)
    slots.take(FULL, b"a")
    slots.pin(0)
    slots.forget(FULL, b"a")
    assert log.take()[-1] == BlocksRemoved(FULL, [b"a"], "CPU")
    assert slots.find(FULL, b"a") is None
    assert slots.take(FULL, b"b") is None
    slots.unpin(0)
    assert slots.take(FULL, b"b") == 0
