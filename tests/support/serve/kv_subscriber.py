"""A subscriber to KV events, written from docs/reference/kv-events.md with zmq and msgpack only.

It tracks the blocks of an engine by group and medium, and detects lost batches and restarts by the numbers of
the batches.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import msgspec
import zmq

STORED = (
    "type", "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name",
    "extra_keys", "group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window",
)  # fmt: skip
REMOVED = ("type", "block_hashes", "medium", "group_idx")
END, SNAPSHOT = 2**64 - 1, 2**64 - 2


def fields(event: Any) -> dict[str, Any]:
    """Returns the fields of an event by name, from either encoding."""
    if isinstance(event, dict):
        return event
    names = {"BlockStored": STORED, "BlockRemoved": REMOVED, "AllBlocksCleared": ("type",)}[event[0]]
    return dict(zip(names, event, strict=True))


class Subscriber:
    """``blocks``: the hashes by (group, medium); ``tokens``: hash -> (parent, tokens, salt)."""

    def __init__(self, endpoint: str, replay: str | None = None, *, topic: str = "", hwm: int = 0) -> None:
        self._context = zmq.Context()
        self._events = self._context.socket(zmq.SUB)
        self._events.setsockopt(zmq.RCVHWM, hwm)
        self._events.setsockopt(zmq.IPV6, 1)
        self._events.setsockopt(zmq.RECONNECT_IVL, 10)
        self._events.setsockopt_string(zmq.SUBSCRIBE, topic)
        self._events.connect(endpoint)
        self._replay_from = replay
        self.expected = 0  # number of the next batch
        self._last = 0  # number of the last published (not replayed) batch
        self.num_events = self.num_gaps = self.num_replayed = self.num_lost = self.num_clears = 0
        self.ranks: set[int] = set()
        self.topics: set[bytes] = set()
        self.blocks: dict[tuple[int, str], set[int]] = {}
        self.tokens: dict[int, tuple[int | None, list[int], str | None]] = {}

    def close(self) -> None:
        self._events.close(0)
        self._context.term()

    def read(self, seconds: float) -> int:
        """Read until nothing has arrived for ``seconds``. Returns the number of batches."""
        count = 0
        while self._events.poll(round(seconds * 1000)):
            topic, number, payload = self._events.recv_multipart()
            self.topics.add(topic)
            self._take(int.from_bytes(number, "big"), payload)
            count += 1
        return count

    def _take(self, number: int, payload: bytes) -> None:
        if number < self._last:  # a new engine counts from 0
            self.expected = 0
        self._last = number
        if number < self.expected:
            return  # repeated, or replayed already
        if number > self.expected:
            self.num_gaps += 1
            self.replay()
            if number < self.expected:
                return
            self.num_lost += number - self.expected
        self.expected = number + 1
        self._apply(payload)

    def resync(self) -> None:
        """Request all blocks of the engine."""
        for number, payload in self._asked(SNAPSHOT):
            self.expected = number + 1
            self._apply(payload)

    def replay(self) -> None:
        """Request the batches from the expected one on."""
        if self._replay_from is None:
            return
        for number, payload in self._asked(self.expected):
            if number == self.expected:
                self.expected += 1
                self.num_replayed += 1
                self._apply(payload)

    def _asked(self, start: int) -> Iterator[tuple[int, bytes]]:
        socket = self._context.socket(zmq.DEALER)
        try:
            socket.setsockopt(zmq.IPV6, 1)
            socket.setsockopt(zmq.RCVHWM, 0)
            socket.connect(self._replay_from)
            socket.send_multipart([b"", start.to_bytes(8, "big")])
            deadline = time.monotonic() + 10
            while True:
                assert socket.poll(max(0, round((deadline - time.monotonic()) * 1000))), "no end of a replay"
                empty, number, payload = socket.recv_multipart()
                assert empty == b""
                if int.from_bytes(number, "big") == END:
                    assert payload == b""
                    return
                yield int.from_bytes(number, "big"), payload
        finally:
            socket.close(0)

    def _apply(self, payload: bytes) -> None:
        seconds, events, rank = msgspec.msgpack.decode(payload)
        assert abs(seconds - time.time()) < 600
        self.ranks.add(rank)
        for event in map(fields, events):
            self.num_events += 1
            if event["type"] == "AllBlocksCleared":
                self.num_clears += 1
                self.blocks.clear()
                self.tokens.clear()
                continue
            known = self.blocks.setdefault((event["group_idx"], event["medium"]), set())
            hashes = event["block_hashes"]
            assert len(set(hashes)) == len(hashes)
            if event["type"] == "BlockStored":
                assert not known & set(hashes), "stored twice"
                known.update(hashes)
                self._learn(event)
            else:
                assert self.num_lost or known >= set(hashes), "removed, but never stored"
                known.difference_update(hashes)

    def _learn(self, event: dict[str, Any]) -> None:
        size, parent, hashes = event["block_size"], event["parent_block_hash"], event["block_hashes"]
        if event["medium"] == "CPU":
            assert event["token_ids"] == []
            return
        assert len(event["token_ids"]) == size * len(hashes)
        assert len(event["extra_keys"]) == len(hashes)
        for place, block in enumerate(hashes):
            tokens = event["token_ids"][place * size : (place + 1) * size]
            keys = event["extra_keys"][place]
            found = (parent, tokens, keys[0] if keys else None)
            assert self.tokens.setdefault(block, found) == found
            parent = block
