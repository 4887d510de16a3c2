"""KvEventPublisher: sends KV events to subscribers from a thread of the engine process.

The engine's thread only appends a batch to a queue. If the queue is full, the oldest batch is dropped: the
sequence has a gap, and the next batch starts with ``AllBlocksCleared``, so that subscribers that ignore
sequence numbers keep no removed blocks. A subscriber that reads too slowly loses batches as well (``hwm``),
which this process does not notice.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import zmq

from chorale.config.kv_events import KvEventsConfig
from chorale.engine.kv_cache.index_log import BlocksRemoved, BlocksStored, IndexCleared, IndexEvent, Medium
from chorale.engine.types import AdapterRef, CacheGroup
from chorale.serve.engine.kv_events.encoding import BatchEncoder
from chorale.serve.engine.kv_events.sockets import open_publisher, open_replay

if TYPE_CHECKING:
    from chorale.engine.core import EngineCore

logger = logging.getLogger(__name__)
END = (-1).to_bytes(8, "big", signed=True)  # sequence number of the message that ends a replay
SNAPSHOT = 2**64 - 2  # sequence number that requests a snapshot of the whole index
REPLAY_BYTES = 256 * 2**20  # limit on the size of batches kept for replays
_WARN_SECONDS = 60.0  # least interval of warnings about dropped batches
_SHUTDOWN_SECONDS = 1.0
EVENTS_PER_BATCH = 256  # blocks in each batch of a snapshot
_SLICE, _PAUSE = 64, 0.0005  # batches of a replay between two pauses, and seconds of a pause


def open_kv_events(config: KvEventsConfig | None, replica: int = 0) -> KvEventPublisher | None:
    """Returns an engine's publisher, or None if events are off. Raises ``ConfigError``."""
    return KvEventPublisher(config, replica) if config is not None and config.is_on else None


class KvEventPublisher:
    """The publisher of one engine. All methods are for the engine's thread. After ``start``, another thread
    owns the sockets."""

    def __init__(self, config: KvEventsConfig, replica: int = 0) -> None:
        """Opens the sockets. Raises ``ConfigError`` if an address is taken or cannot be used."""
        self._config, self._replica = config, replica
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            self._publisher = open_publisher(self._context, config, replica)
            self._router = open_replay(self._context, config, replica)
        except BaseException:
            self._context.destroy(0)
            raise
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_write, False)
        os.set_blocking(self._wake_read, False)
        self._pending: deque[tuple[int, float, list[IndexEvent]]] = deque()
        self._is_awake = False  # the thread is about to read ``_pending``
        self._is_closing = False
        self.num_batches = 0  # also the next sequence number
        self.num_dropped = 0
        self._thread: threading.Thread | None = None
        # Used by the publishing thread only:
        self._topic = self._config.topic.encode()
        self._next = 0  # expected sequence number of the next batch
        self._is_empty = True  # no block was ever reported as stored
        self._kept: deque[tuple[int, bytes]] = deque()  # batches for replays
        self._kept_bytes = 0
        self._mirror: EventMirror | None = None  # state for snapshots
        self._unreported = 0  # dropped batches that no warning has counted
        self._warned_at = -_WARN_SECONDS

    def start(self, core: EngineCore) -> None:
        """Turn on the index log of ``core``, and start publishing.

        The first batch tells subscribers to clear the blocks of an earlier engine.
        """
        self._log, limits = core.index_log, core.limits
        core.log_index()
        if self._router is not None:
            self._mirror = EventMirror(limits.block_size)
        self._encoder = BatchEncoder(
            self._config.encoding, self._replica, limits.block_size, limits.sliding_window
        )
        self.publish([IndexCleared()])
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()

    def collect(self) -> None:
        """Publish the events logged since the last call. Only for cores whose log nothing else reads."""
        self.publish(self._log.take())

    def publish(self, events: list[IndexEvent]) -> None:
        """Queue the events of a step for publishing. Never blocks."""
        if self._config.groups != "all":
            events = [
                each for each in events if isinstance(each, IndexCleared) or each.group is CacheGroup.FULL
            ]
        if not events:
            return
        if len(self._pending) >= self._config.max_queue_size:
            with contextlib.suppress(IndexError):  # the thread has just taken it
                self._pending.popleft()
                self.num_dropped += 1
        self._pending.append((self.num_batches, time.time(), events))
        self.num_batches += 1
        if not self._is_awake:
            self._wake()

    def _wake(self) -> None:
        self._is_awake = True
        with contextlib.suppress(BlockingIOError):
            os.write(self._wake_write, b"\0")

    def close(self) -> None:
        """Publish the queued batches and ``AllBlocksCleared``, and close the sockets."""
        if self._thread is not None:
            self.publish([IndexCleared()])
            self._is_closing = True
            self._wake()
            self._thread.join(_SHUTDOWN_SECONDS)
            if self._thread.is_alive():
                return  # the process ends soon
        self._publisher.close()
        if self._router is not None:
            self._router.close()
        self._context.term()
        os.close(self._wake_read)
        os.close(self._wake_write)

    # ------------------------------------------------------------------ publishing thread

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._wake_read, zmq.POLLIN)
        poller.register(self._publisher, zmq.POLLIN)
        if self._router is not None:
            poller.register(self._router, zmq.POLLIN)
        while not (self._is_closing and not self._pending):
            try:
                ready = dict(poller.poll())
                if self._publisher in ready:
                    self._read_subscriptions()
                if self._wake_read in ready:
                    os.read(self._wake_read, 4096)
                    self._is_awake = False  # cleared before reading the queue, so that no batch is missed
                    self._send_pending()
                if self._router is not None and self._router in ready:
                    self._replay(self._router)
            except Exception:
                logger.exception("the publisher of KV events had an error and continues")
                time.sleep(0.1)

    def _read_subscriptions(self) -> None:
        """Repeat the last batch for new subscribers as long as no block was ever stored: it clears the blocks
        of an earlier engine."""
        is_new = False
        with contextlib.suppress(zmq.Again):
            while True:
                is_new |= self._publisher.recv(zmq.NOBLOCK)[:1] == b"\1"
        if is_new and self._is_empty and self._kept:
            self._send(*self._kept[-1])

    def _send_pending(self) -> None:
        while self._pending:
            number, seconds, events = self._pending.popleft()
            if number != self._next:
                self._note_dropped(number - self._next)
                events = [IndexCleared(), *events]
            self._next = number + 1
            self._is_empty &= not any(isinstance(event, BlocksStored) for event in events)
            if self._mirror is not None:
                self._mirror.apply(events)
            payload = self._encoder.encode(seconds, events)
            self._keep(number, payload)
            self._send(number, payload)

    def _send(self, number: int, payload: bytes) -> None:
        self._publisher.send_multipart([self._topic, number.to_bytes(8, "big"), payload], zmq.NOBLOCK)

    def _keep(self, number: int, payload: bytes) -> None:
        self._kept.append((number, payload))
        self._kept_bytes += len(payload)
        while len(self._kept) > self._config.buffer_steps or (
            self._kept_bytes > REPLAY_BYTES and len(self._kept) > 1
        ):
            self._kept_bytes -= len(self._kept.popleft()[1])

    def _note_dropped(self, count: int) -> None:
        self._unreported += count
        if time.monotonic() - self._warned_at >= _WARN_SECONDS:
            logger.warning(
                "%d batches of KV events were dropped, because the queue was full (max_queue_size %d); "
                "subscribers must clear their index",
                self._unreported,
                self._config.max_queue_size,
            )
            self._unreported, self._warned_at = 0, time.monotonic()

    # ------------------------------------------------------------------ replays

    def _replay(self, router: zmq.Socket[bytes]) -> None:
        """Answer a replay request: kept batches from a sequence number on, or a snapshot, then ``END``."""
        client, *rest = router.recv_multipart()
        delimiter, start = rest[:-1], rest[-1] if rest else b""
        if len(start) != 8 or delimiter not in ([], [b""]):
            logger.warning("ignored a replay request that is not a sequence number of 8 bytes")
            return
        first = int.from_bytes(start, "big")
        batches = self._snapshot() if first == SNAPSHOT else [each for each in self._kept if each[0] >= first]
        head = [client, *delimiter]
        try:
            for count, (number, payload) in enumerate(batches, 1):
                router.send_multipart([*head, number.to_bytes(8, "big"), payload], zmq.NOBLOCK)
                if count % _SLICE == 0:  # send new batches, and let the engine's thread have the GIL
                    self._send_pending()
                    time.sleep(_PAUSE)
            router.send_multipart([*head, END, b""], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            logger.warning("a replay of KV events was aborted: %s", error)

    def _snapshot(self) -> list[tuple[int, bytes]]:
        """Returns the index after the last batch as batches that all have its sequence number."""
        batches, now = list[tuple[int, bytes]](), time.time()
        for events in () if self._mirror is None else self._mirror.snapshot():
            batches.append((self._next - 1, self._encoder.encode(now, events)))
            time.sleep(_PAUSE)  # lets the engine's thread have the GIL
        return batches


class _Block(NamedTuple):
    parent: bytes | None
    tokens: bytes  # int32 token ids
    cache_salt: str
    adapter: AdapterRef


class EventMirror:
    """The blocks that subscribers should know after all events so far, from which late subscribers get a
    snapshot. It takes about 300 bytes per block of the prefix index."""

    def __init__(self, block_size: int) -> None:
        self._token_bytes = 4 * block_size
        self._blocks: dict[tuple[CacheGroup, Medium], dict[bytes, _Block]] = {}

    def apply(self, events: Iterable[IndexEvent]) -> None:
        for event in events:
            if isinstance(event, BlocksStored):
                self._store(event)
            elif isinstance(event, BlocksRemoved):
                blocks = self._blocks.get((event.group, event.medium), {})
                for block_hash in event.hashes:
                    blocks.pop(block_hash, None)
            else:
                self._blocks.clear()

    def _store(self, event: BlocksStored) -> None:
        blocks = self._blocks.setdefault((event.group, event.medium), {})
        tokens, size = event.token_ids.tobytes(), self._token_bytes
        parent, salt = event.parent, event.cache_salt
        for index, block_hash in enumerate(event.hashes):
            blocks[block_hash] = _Block(
                parent, tokens[index * size : (index + 1) * size], salt, event.adapter
            )
            parent, salt = block_hash, ""

    def snapshot(self) -> Iterator[list[IndexEvent]]:
        """Yields batches of events that clear a subscriber's state and rebuild this one."""
        yield [IndexCleared()]
        for (group, medium), blocks in self._blocks.items():
            known = list(blocks.items())
            for start in range(0, len(known), EVENTS_PER_BATCH):
                yield [
                    BlocksStored(
                        group,
                        (block_hash,),
                        block.parent,
                        np.frombuffer(block.tokens, np.int32),
                        medium,
                        block.cache_salt,
                        block.adapter,
                    )
                    for block_hash, block in known[start : start + EVENTS_PER_BATCH]
                ]
