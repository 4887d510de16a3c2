"""The publisher of KV events, with a subscriber that implements only the documented format."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from chorale.client.base import EngineInfo
from chorale.config.kv_events import KvEventsConfig, endpoint_of
from chorale.engine.kv_cache.index_log import event_hash
from chorale.engine.types import CacheGroup, EngineLimits, GenerateRequest, SamplingSpec
from chorale.errors import ConfigError
from chorale.llm.engine import OfflineEngine
from chorale.serve.engine.kv_events.publisher import KvEventPublisher
from chorale.serve.engine.kv_events.sockets import is_bound
from tests.support.engine.simulation import EOS, VOCAB, Life
from tests.support.event_loop import wait_until
from tests.support.ports import free_port
from tests.support.serve.kv_subscriber import Subscriber

LIMITS = EngineLimits(
    num_blocks=300, block_size=4, max_num_seqs=16, max_num_batched_tokens=256, max_model_len=200,
    sliding_window=9, eos_token_ids=EOS, vocab_size=VOCAB, async_scheduling=True,
)  # fmt: skip


OPENED = contextlib.ExitStack()  # closed after each test


@pytest.fixture
def folder(sockets: Path) -> Iterator[Path]:
    with OPENED:
        yield sockets


def listen(endpoint: str, replay: str | None = None, **options: Any) -> Subscriber:
    heard = Subscriber(endpoint, replay, **options)
    OPENED.callback(heard.close)
    return heard


class Stand:
    """An engine with a publisher, and random requests for which the KV pool is too small."""

    def __init__(self, folder: Path, seed: int = 1, replica: int = 0, **config: Any) -> None:
        self.endpoint, self.replay = f"ipc://{folder}/events", f"ipc://{folder}/replay"
        chosen = {"endpoint": self.endpoint, "replay_endpoint": self.replay} | config
        self.publisher = KvEventPublisher(KvEventsConfig(enable_kv_cache_events=True, **chosen), replica)
        self.endpoint, self.replay = (endpoint_of(each, replica) for each in (self.endpoint, self.replay))
        OPENED.callback(self.close)
        self.is_open = True
        self.life = Life(LIMITS)
        self.life.step = self.life.core.step  # type: ignore[method-assign]  # skips the checks of Life
        self.rng = random.Random(seed)
        self.texts = [[self.rng.randrange(VOCAB) for _ in range(150)] for _ in range(12)]
        self.number = 0
        self.publisher.start(self.life.core)

    def close(self) -> None:
        if self.is_open:
            self.publisher.close()
            self.is_open = False

    def step(self) -> None:
        """Run one step, after adding requests and sometimes an abort or, rarely, a reset."""
        core, rng = self.life.core, self.rng
        while len(core._engine.requests) < 12:
            self.number += 1
            prompt = rng.choice(self.texts)[: rng.randint(1, 150)]
            if rng.random() < 0.5:
                prompt = prompt + [rng.randrange(VOCAB) for _ in range(20)]
            core.add_request(
                GenerateRequest(
                    request_id=str(self.number),
                    prompt_token_ids=prompt,
                    sampling=SamplingSpec(max_tokens=rng.randint(1, 40), seed=self.number),
                    cache_salt=rng.choice(("", "", "mine")),
                )
            )
        if rng.random() < 0.02:
            core.abort(rng.choice(sorted(core._engine.requests)))
        if rng.random() < 0.0005:
            core._engine.cache.forget_all()
        core.step()
        self.publisher.collect()

    def index(self, group: CacheGroup) -> set[int]:
        """Returns the event hashes of the blocks in the engine's prefix index."""
        return {event_hash(each) for each in self.life.core._engine.cache.pool.published(group)}

    def agrees(self, heard: Subscriber, *, both: bool) -> bool:
        found = heard.blocks.get((0, "GPU"), set()) == self.index(CacheGroup.FULL)
        window = heard.blocks.get((1, "GPU"), set())
        return found and window == (self.index(CacheGroup.WINDOW) if both else set())


def connected(stand: Stand, **options: Any) -> Subscriber:
    """Returns a subscriber that has received the first batch."""
    heard = listen(stand.endpoint, stand.replay, **options)
    wait_until(lambda: heard.read(0.02), "the first batch")
    return heard


def follow(stand: Stand, heard: Subscriber, num_events: int, burst: int) -> None:
    """Runs bursts of steps until the subscriber has ``num_events`` events, then reads all others."""
    while heard.num_events < num_events:
        for _ in range(burst):
            stand.step()
        heard.read(0.01)
    sent = stand.publisher.num_batches
    wait_until(lambda: heard.read(0.05) or heard.expected >= sent or heard.replay(), "the last batch")


@pytest.mark.parametrize(
    ("num_events", "encoding", "groups", "hwm"),
    [
        (2_000, "map", "all", 100_000),
        (800, "array", "full", 100_000),
        (1_500, "map", "all", 3),
        *(pytest.param(100_000, e, "all", hwm, marks=pytest.mark.slow)
          for e, hwm in (("map", 100_000), ("array", 100_000), ("map", 3), ("array", 3))),
    ],
)  # fmt: skip
def test_a_subscriber_ends_with_the_engines_index(
    folder: Path, num_events: int, encoding: Any, groups: Any, hwm: int
) -> None:
    """With ``hwm`` 3 and bursts of steps, some batches are lost and replayed."""
    stand = Stand(folder, encoding=encoding, groups=groups, hwm=hwm, topic="kv@pod@model", replica=3)
    heard = connected(stand, topic="kv@", hwm=0 if hwm > 3 else 3)
    follow(stand, heard, num_events, 20 if hwm > 3 else 600)
    assert heard.num_lost == 0
    assert (heard.num_gaps > 0) == (heard.num_replayed > 0) == (hwm == 3)
    assert stand.agrees(heard, both=groups == "all")
    assert len(stand.index(CacheGroup.FULL)) > 50
    assert stand.life.core.stats().num_preemptions > 0
    assert (heard.ranks, heard.topics) == ({3}, {b"kv@pod@model"})


def test_parents_and_tokens_of_events_give_the_block_hashes(folder: Path) -> None:
    """Computes the hashes from the events with hashlib only."""
    from hashlib import blake2b

    stand = Stand(folder)
    secret = stand.life.core._admission.prefix_secret
    heard = connected(stand)
    follow(stand, heard, 400, 5)

    def digest(block: int) -> bytes:
        parent, tokens, salt = heard.tokens[block]
        if parent is None:
            before = blake2b(f"salt:{salt or ''}".encode(), key=secret, digest_size=16).digest()
        else:
            before = digest(parent)
        packed = b"".join(token.to_bytes(4, "little") for token in tokens)
        return blake2b(before + packed, digest_size=16).digest()

    blocks = heard.blocks[0, "GPU"]
    assert len(blocks) > 50
    assert {heard.tokens[block][2] for block in blocks} == {None, "mine"}
    whole = [block for block in blocks if has_chain(heard, block)]
    assert len(whole) > 50
    for block in whole:
        assert int.from_bytes(digest(block)[-8:], "big") == block


def has_chain(heard: Subscriber, block: int | None) -> bool:
    while block is not None:
        if block not in heard.tokens:
            return False
        block = heard.tokens[block][0]
    return True


def test_a_full_queue_drops_the_oldest_batches_with_a_warning(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stand = Stand(folder, max_queue_size=10)
    heard = connected(stand)
    publisher = stand.publisher
    with monkeypatch.context() as patch:
        patch.setattr(publisher, "_wake", lambda: None)  # the thread is not woken
        for _ in range(60):
            stand.step()
        assert len(publisher._pending) == 10
    dropped = publisher.num_dropped
    assert dropped == publisher.num_batches - 1 - 10 > 0
    publisher._wake()
    wait_until(lambda: heard.read(0.05) == 0 and heard.expected == publisher.num_batches, "the rest")
    assert (heard.num_gaps, heard.num_lost, heard.num_clears) == (1, dropped, 2)
    assert f"{dropped} batches of KV events were dropped" in caplog.text
    assert heard.blocks[0, "GPU"] <= stand.index(CacheGroup.FULL)  # no removed blocks


def test_a_stalled_subscriber_neither_blocks_the_engine_nor_fills_its_queue(folder: Path) -> None:
    stand = Stand(folder, hwm=5, buffer_steps=7)
    connected(stand, hwm=1)
    for _ in range(400):
        stand.step()
    publisher = stand.publisher
    wait_until(lambda: not publisher._pending, "everything is sent")
    assert len(publisher._kept) == 7
    assert publisher._kept_bytes == sum(len(payload) for _, payload in publisher._kept)
    assert publisher.num_dropped == 0


def test_a_late_subscriber_is_told_that_an_engine_is_empty(folder: Path) -> None:
    """A subscriber that reconnects to a restarted engine has to drop its blocks."""
    stand = Stand(folder)
    time.sleep(0.05)  # nobody receives the first batch
    first, second = (listen(stand.endpoint) for _ in range(2))
    wait_until(lambda: first.read(0.02), "the first subscriber")
    wait_until(lambda: second.read(0.02), "the second subscriber")
    assert first.num_clears >= 1 <= second.num_clears
    while not stand.index(CacheGroup.FULL):
        stand.step()
    first.read(0.05)
    clears = first.num_clears
    third = listen(stand.endpoint)
    assert third.read(0.3) == 0
    first.read(0.05)
    assert first.num_clears == clears  # blocks are stored, so it is not repeated
    stand.close()
    wait_until(lambda: first.read(0.05), "the engine's end")
    assert first.blocks == {}


def test_a_late_subscriber_can_request_a_snapshot(folder: Path) -> None:
    """The batches that it missed are no longer kept. A snapshot includes parents and tokens."""
    stand = Stand(folder, buffer_steps=5, groups="all")
    early = connected(stand)
    for _ in range(20):
        for _ in range(10):
            stand.step()
        early.read(0.01)
    late = listen(stand.endpoint, stand.replay)
    late.resync()
    for _ in range(3):
        stand.step()
    sent = stand.publisher.num_batches
    for heard in (early, late):
        wait_until(lambda each=heard: each.read(0.02) or each.expected >= sent, "the last batch")
        assert heard.num_lost == 0
        assert stand.agrees(heard, both=True)
    blocks = late.blocks[0, "GPU"]
    assert {block: late.tokens[block] for block in blocks} == {block: early.tokens[block] for block in blocks}


def test_malformed_replay_requests_are_ignored(folder: Path) -> None:
    stand = Stand(folder)
    connected(stand)
    context = zmq.Context.instance()
    for frames in ([b""], [b"", b"123"], [b"x", b"y", b"z"], [b"", b"", b"\0" * 8], [b"\0" * 2000]):
        asker = context.socket(zmq.DEALER)
        asker.connect(stand.replay)
        asker.send_multipart(frames)
        assert not asker.poll(20)
        asker.close(0)
    bare = context.socket(zmq.DEALER)  # without the empty frame that a REQ socket sends
    bare.connect(stand.replay)
    bare.send(bytes(8))
    assert bare.poll(5000)
    assert bare.recv_multipart()[0] == bytes(8)
    assert bare.recv_multipart() == [b"\xff" * 8, b""]
    bare.close(0)


def test_an_engine_may_connect_to_a_subscriber_that_listens(folder: Path) -> None:
    listener = zmq.Context.instance().socket(zmq.SUB)
    listener.setsockopt(zmq.SUBSCRIBE, b"")
    port = listener.bind_to_random_port("tcp://127.0.0.1")
    stand = Stand(folder, endpoint=f"tcp://localhost:{port}", bind=False, replay_endpoint=None)
    assert listener.poll(5000)
    _, number, _ = listener.recv_multipart()
    assert number == bytes(8)
    stand.close()
    listener.close(0)


@pytest.mark.parametrize("host", ["*", "127.0.0.1", "localhost", "lo", "[::1]", "[::]"])
def test_addresses_of_this_machine_are_bound(folder: Path, host: str) -> None:
    if "[" in host and not has_ipv6():
        pytest.skip("no IPv6 here")
    port = free_port()
    Stand(folder, endpoint=f"tcp://{host}:{port}", replay_endpoint=None)
    heard = listen(f"tcp://{'[::1]' if '[' in host else '127.0.0.1'}:{port}")
    wait_until(lambda: heard.read(0.02), "the first batch")


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


def test_addresses_of_other_machines_are_connected_to() -> None:
    assert not is_bound("tcp://192.0.2.7:5557")
    assert not is_bound("tcp://no-such-host.invalid:5557")
    assert is_bound("tcp://192.0.2.7:5557", True)
    assert not is_bound("tcp://*:5557", False)


def test_a_taken_address_is_a_clear_error(folder: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for name in ("endpoint", "replay_endpoint"):
            config: dict[str, Any] = {"endpoint": f"ipc://{folder}/x", name: f"tcp://*:{port}"}
            with pytest.raises(ConfigError, match=f"{name} .*:{port}: the address is in use"):
                KvEventPublisher(KvEventsConfig(enable_kv_cache_events=True, **config))
    with pytest.raises(ConfigError, match=r"cannot listen on endpoint .*: "):
        KvEventPublisher(KvEventsConfig(enable_kv_cache_events=True, endpoint="ipc:///no/such/folder/x"))


def test_a_socket_path_is_taken_over_only_from_a_dead_engine(folder: Path) -> None:
    config = KvEventsConfig(enable_kv_cache_events=True, endpoint=f"ipc://{folder}/x")
    first = KvEventPublisher(config)
    with pytest.raises(ConfigError, match="in use"):
        KvEventPublisher(config)
    first.close()
    with socket.socket(socket.AF_UNIX) as killed:  # its file remains
        killed.bind(f"{folder}/y")
    assert os.path.exists(f"{folder}/y")
    KvEventPublisher(KvEventsConfig(enable_kv_cache_events=True, endpoint=f"ipc://{folder}/y")).close()


def test_an_offline_engine_publishes_its_events(folder: Path) -> None:
    stand = Stand(folder)
    heard = connected(stand)
    engine = OfflineEngine(
        stand.life.core, EngineInfo(model="m", max_model_len=200, max_num_seqs=16), stand.publisher
    )
    asked = GenerateRequest(
        request_id="1", prompt_token_ids=list(range(50)), sampling=SamplingSpec(max_tokens=9)
    )
    engine.run([asked], lambda chunks: ())
    wait_until(lambda: heard.read(0.02) or stand.agrees(heard, both=False), "the prompt's blocks")
    assert len(heard.blocks[0, "GPU"]) >= 12
    stand.is_open = False
    engine.close()
    wait_until(lambda: heard.read(0.05) or not heard.blocks, "the end")
