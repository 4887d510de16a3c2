"""Cost of routing a request among replicas: microseconds of the HTTP process's event loop, by prompt length.

    python benchmarks/replica_routing.py
    python benchmarks/replica_routing.py --replicas 8 --rounds 50

What ``ReplicaClient.submit`` does beyond what it does for one engine: hash the prompt as far as any replica
has it, find the hit of each, compute the costs and choose. Three cases: a prompt that no replica has (cold),
one that a replica has but for its last block (a conversation goes on), and one that every replica has (a hot
prefix). A prompt of more than ``SLICE`` blocks is hashed in slices between the loop's other work; the longest
slice is what another stream may wait. Then the other direction: the messages that a follower of an engine
reads, by block that was published, and the snapshot of a full index. No engine runs: indexes are filled by
the engine's own functions. Figures are medians of the CPU time of the thread.
"""

from __future__ import annotations

import argparse
import statistics
import time
from array import array
from collections.abc import Callable

from chorale.client.follower import Follower
from chorale.client.many_engines import SLICE
from chorale.client.prefix_index import PrefixIndex, PrefixSearch
from chorale.client.routing import choose, cost
from chorale.client.wire import EngineUpdate, PrefixSnapshot, decode_from_engine, encode
from chorale.engine.kv_cache.changes import IndexChanges
from chorale.engine.kv_cache.hashing import extend_chain, salted_root
from chorale.engine.types import BlockChanges, CacheGroup, EngineStats, GenerateRequest, PrefixIndexState

BLOCK, WINDOW, SECRET = 16, 128, b"0123456789abcdef"
LENGTHS = (1024, 16 * 1024, 128 * 1024)


def chain(prompt: list[int]) -> list[bytes]:
    hashes: list[bytes] = []
    extend_chain(hashes, salted_root(SECRET, ""), array("i", prompt).tobytes(), 4 * BLOCK)
    return hashes


def follower(prompt: list[int]) -> Follower:
    """A follower of an idle engine that has this prompt."""
    joined = b"".join(chain(prompt))
    state = PrefixIndexState(SECRET, BLOCK, WINDOW, BlockChanges(joined, b"", joined, b""))
    made = Follower()
    made.receive(PrefixSnapshot("e", state, EngineStats(kv_blocks_total=100_000)))
    return made


def route(request: GenerateRequest, followers: list[Follower], slices: list[float]) -> int | None:
    search = PrefixSearch(request, [each.index for each in followers])
    while True:
        began = time.thread_time()
        over = search.advance(SLICE)
        slices.append(time.thread_time() - began)
        if over:
            break
    hits = search.hits()
    num_prompt = len(request.prompt_token_ids)
    return choose([cost(f.load(), num_prompt, hit) for f, hit in zip(followers, hits, strict=True)], 0)


def median_us(rounds: int, work: Callable[[], object]) -> float:
    found = []
    for _ in range(rounds):
        began = time.thread_time()
        work()
        found.append(time.thread_time() - began)
    return 1e6 * statistics.median(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=30)
    given = parser.parse_args()
    count, rounds = given.replicas, given.rounds
    print(f"{count} replicas; microseconds a request (median of {rounds}), longest slice in brackets")
    print(f"{'prompt':>8}  {'cold':>18}  {'one has it':>18}  {'all have it':>18}")
    for length in LENGTHS:
        prompt = [number % 50_000 for number in range(length)]
        request = GenerateRequest(request_id="r", prompt_token_ids=prompt)
        full, empty = follower(prompt[:-BLOCK]), follower([])
        cells = []
        for followers in ([empty] * count, [*[empty] * (count - 1), full], [full] * count):
            slices: list[float] = []
            each = median_us(rounds, lambda r=request, f=followers, s=slices: route(r, f, s))
            cells.append(f"{each:,.0f} ({1e6 * statistics.median(largest(slices, rounds)):,.0f})")
        print(f"{length:>8,}  " + "  ".join(f"{cell:>18}" for cell in cells))
    messages(rounds)


def largest(slices: list[float], rounds: int) -> list[float]:
    """The longest slice of each request."""
    size = len(slices) // rounds
    return [max(slices[start : start + size]) for start in range(0, len(slices), size)]


def collect(hashes: list[bytes]) -> bytes:
    """What following adds to a step of the engine: half of the hashes come, in both groups, and half go."""
    changes, half = IndexChanges(), len(hashes) // 2
    for block_hash in hashes[:half]:
        changes.add(CacheGroup.FULL, block_hash)
        changes.add(CacheGroup.WINDOW, block_hash)
    for block_hash in hashes[half:]:
        changes.remove(CacheGroup.FULL, block_hash)
    return encode(EngineUpdate("e" * 16, EngineStats(), 7, changes.take()))


def messages(rounds: int) -> None:
    hashes = chain([number % 50_000 for number in range(BLOCK * 100_000)])
    stats = EngineStats()

    def joined(first: int, last: int) -> bytes:
        return b"".join(hashes[first:last])

    for blocks in (16, 256):
        changes = BlockChanges(joined(0, blocks), joined(blocks, 2 * blocks), joined(0, blocks), b"")
        data = encode(EngineUpdate("e" * 16, stats, 7, changes))
        index = PrefixIndex(PrefixIndexState(SECRET, BLOCK, WINDOW, BlockChanges(b"", b"", b"", b"")))
        made = Follower()
        made.index = index
        each = median_us(rounds * 10, lambda d=data, m=made: m.receive(decode_from_engine(d)))
        there = median_us(rounds * 10, lambda b=blocks: collect(hashes[: 2 * b]))
        print(
            f"a step that published {blocks} blocks: {there:,.0f} us in the engine, {each:,.0f} us to read "
            f"({len(data):,} bytes)"
        )
    whole = joined(0, 100_000)
    state = PrefixIndexState(SECRET, BLOCK, WINDOW, BlockChanges(whole, b"", whole, b""))
    snapshot = encode(PrefixSnapshot("e" * 16, state, stats))
    each = median_us(5, lambda: Follower().receive(decode_from_engine(snapshot)))  # type: ignore[arg-type]
    print(f"a snapshot of 100,000 blocks: {each / 1000:,.1f} ms to read ({len(snapshot) / 2**20:.1f} MiB)")


if __name__ == "__main__":
    main()
