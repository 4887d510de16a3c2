"""A fleet of engines on paper: hit rate, time to the first token, and what a router needs, by policy.

    python benchmarks/fleet.py                  # 1,000 engines, 10^6 chats; minutes on one core
    python benchmarks/fleet.py --part router    # only what the real data structures cost
    python benchmarks/fleet.py --engines 100 --chats 20000 --agents 2000

Each engine is an H200 that runs 120b. Its times are measured ones (docs/kernels.md, "The step, measured"):
46,416 prompt tokens a second, decode steps of 2.09, 5.20, 16.8 and 23.5 ms at 1, 8, 64 and 256 rows,
interpolated between. While rows decode, prompts add 12 ms to each step, or as much as the rows' own tokens
take, whichever is longer (docs/architecture.md, "Prompts must not stall streams"). The pool holds 14 rows of
131,010 tokens (docs/kernels.md), twice that in fp8.

Clients hold conversations, one after the other, each turn some time after the answer:

* agentic: after NVIDIA Dynamo's recipe for H200 (32 concurrent conversations an engine, 64k tokens in and 400
  out on average, 90 % of a prompt computed before): 19 turns, each 6,000 tokens longer than all before.
* chat: 200 clients an engine, 4 turns on average, 150 tokens in and 350 out, behind one of 50 system prompts
  of 2,000 tokens, of unequal popularity.

Policies: round robin; power of two choices by load; exact, which is Chorale's: ``client/routing.py`` over the
engines' real loads and prefixes. Its arithmetic is done for all engines at once by numpy and, for those that
hold the conversation, by ``cost`` itself; tests/bench/test_fleet.py compares both with ``choose``.

Simplified: an engine's cache has an entry for each conversation and each system prompt, least recently used
first, in place of blocks; a prompt is computed without interruption, in the order of arrival; a row decodes
at the speed of its first step; nothing is preempted. The agentic part has fewer conversations (``--agents``).
"""

from __future__ import annotations

import argparse
import heapq
import random
import sys
import time
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import msgspec
import numpy as np

from chorale.client.prefix_index import PrefixIndex, PrefixSearch
from chorale.client.routing import CROWD, ROW_TOKENS, SHORTAGE, Load, choose, cost
from chorale.engine.kv_cache.hashing import extend_chain, salted_root
from chorale.engine.types import BlockChanges, GenerateRequest, PrefixIndexState

PREFILL = 46_416.0  # prompt tokens a second
STEPS = ((1, 2.09), (8, 5.20), (64, 16.8), (256, 23.5))  # rows -> ms
PROMPT_MS = 12.0  # that prompts may add to a step, at least
POOL_TOKENS = 2 * 14 * 131_010  # of fp8
MOST_ROWS = 256
BLOCK, WINDOW = 16, 128
RESTART = 30.0  # seconds until an engine that was lost is back, with an empty cache: an assumption

_TABLE = np.interp(np.arange(4 * MOST_ROWS), *zip(*STEPS, strict=True)).tolist()


def step_seconds(rows: int) -> float:
    """Of a step in which so many rows decode. More rows than the engine runs wait, in turn."""
    return float(_TABLE[min(rows, MOST_ROWS)]) * max(1.0, rows / MOST_ROWS) / 1e3


def prompt_share(rows: int) -> float:
    """The part of the time that prompts get while so many rows decode."""
    if rows == 0:
        return 1.0
    own = step_seconds(rows)
    return max(PROMPT_MS / 1e3, own) / (own + max(PROMPT_MS / 1e3, own))


@dataclass(frozen=True)
class Workload:
    name: str
    clients: int  # for each engine
    turns: float  # mean; ``exact_turns``: of every conversation
    tokens_in: int  # new ones of a turn
    tokens_out: int
    pause: float  # mean seconds between an answer and the next turn
    num_systems: int = 0  # system prompts that conversations share
    system_tokens: int = 0
    exact_turns: bool = False


AGENTIC = Workload("agentic", 32, 19, 6_000, 400, 2.0, exact_turns=True)
CHAT = Workload("chat", 200, 4, 150, 350, 20.0, 50, 2_000)
HOT = Workload("one hot prefix of 32,000", 40, 2, 150, 350, 20.0, 1, 32_000)


@dataclass(frozen=True)
class Scenario:
    policy: str
    workload: Workload
    engines: int
    conversations: int
    routers: int = 1
    delay: float = 0.0  # seconds until a router learns what an engine cached or runs
    lost: int = 0  # engines that die when half of the conversations have begun
    pool: int = POOL_TOKENS
    seed: int = 1


@dataclass
class Result:
    """Counted from the first turn of the clients' second conversations on, until the last one begins;
    ``served`` and ``retried``: of the whole run.
    """

    served: int = 0
    retried: int = 0
    requests: int = 0
    prompt_tokens: int = 0
    hit_tokens: int = 0
    possible_tokens: int = 0  # that one endless cache would have hit
    output_tokens: int = 0
    seconds: float = 0.0  # simulated, while it was counted
    cpu: float = 0.0  # seconds of the simulation itself
    blocks_stored: int = 0
    blocks_removed: int = 0
    ttft: array[float] = field(default_factory=lambda: array("f"))
    after_loss: array[float] = field(default_factory=lambda: array("f"))  # TTFT in the minute after it

    @property
    def hit_rate(self) -> float:
        return self.hit_tokens / max(1, self.prompt_tokens)

    @property
    def optimum(self) -> float:
        return self.possible_tokens / max(1, self.prompt_tokens)

    def percentile(self, share: float) -> float:
        return float(np.percentile(np.frombuffer(self.ttft, np.float32), share)) if self.ttft else 0.0


class View:
    """What one router believes of the engines' loads."""

    def __init__(self, engines: int) -> None:
        self.rows = np.zeros(engines)
        self.busy_until = np.zeros(engines)
        self.pinned = np.zeros(engines)  # tokens of requests that run or wait
        self.read_at = 0.0

    def read(self, truth: View, now: float) -> None:
        for name in ("rows", "busy_until", "pinned"):
            getattr(self, name)[:] = getattr(truth, name)
        self.read_at = now

    def add(self, engine: int, until: float, tokens: int) -> None:
        self.rows[engine] += 1
        self.busy_until[engine] = until
        self.pinned[engine] += tokens

    def load(self, engine: int, now: float, pool: int) -> Load:
        left = max(0.0, float(self.busy_until[engine]) - now) * PREFILL / 2
        return Load(int(left), int(self.rows[engine]), int(pool - self.pinned[engine]))

    def costs(self, now: float, num_prompt: int, hits: np.ndarray | float, pool: int) -> np.ndarray:
        """``routing.cost`` of every engine."""
        left = np.floor(np.maximum(self.busy_until - now, 0.0) * (PREFILL / 2))
        computed = left + (num_prompt - hits)
        short = np.maximum(computed - (pool - self.pinned), 0.0)
        return computed + ROW_TOKENS * self.rows * (1 + self.rows / CROWD) + SHORTAGE * short


class Fleet:
    """One simulation. ``run`` returns when every conversation has ended."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario, self.workload = scenario, scenario.workload
        count = scenario.engines
        self.result = Result()
        self.truth = View(count)
        stale = scenario.delay > 0 or scenario.routers > 1
        self.views = [View(count) for _ in range(scenario.routers)] if stale else [self.truth]
        self.caches: list[OrderedDict[int, int]] = [OrderedDict() for _ in range(count)]
        self.used = [0] * count  # tokens in the cache
        self.running: list[set[int]] = [set() for _ in range(count)]
        self.is_up = np.ones(count, bool)
        self.lives = [0] * count
        self.holders: dict[int, dict[int, int]] = {}  # conversation -> engine -> tokens, as routers know it
        self.systems = np.zeros((max(1, self.workload.num_systems), count))
        self.news: deque[tuple[float, int, int, int]] = (
            deque()
        )  # (when a router reads it, key, engine, tokens)
        self.random = random.Random(scenario.seed)
        weights = [1 / (rank + 1) for rank in range(max(1, self.workload.num_systems))]
        self.system_of = self.random.choices(range(len(weights)), weights, k=4096)
        self.context: dict[int, int] = {}
        self.turns_left: dict[int, int] = {}
        self.begun = self.turn = 0
        self.to_skip = scenario.engines * scenario.workload.clients
        self.counted_from = 0.0
        self.lost_at: float | None = None
        self.events: list[
            tuple[float, int, int, int, int]
        ] = []  # time, conversation, engine or -1, life, tokens

    # ------------------------------------------------------------------ conversations

    def run(self) -> Result:
        began, scenario = time.process_time(), self.scenario
        for _ in range(min(scenario.conversations, scenario.engines * self.workload.clients)):
            spread = self.workload.pause + self.workload.tokens_out * 0.03
            self.begin(self.random.uniform(0, spread), warm=True)
        while self.events:
            now, conversation, engine, life, tokens = heapq.heappop(self.events)
            if self.is_counting:
                self.counted_from = self.counted_from or now
                self.result.seconds = now - self.counted_from
            if scenario.lost and self.lost_at is None and 2 * self.begun >= scenario.conversations:
                self.lose(now)
            if engine >= 0:
                if life == self.lives[engine]:
                    self.finish(now, conversation, engine, tokens)
            elif engine == -1:
                self.submit(now, conversation)
            else:
                self.is_up[life] = True
        self.result.cpu = time.process_time() - began
        return self.result

    @property
    def is_counting(self) -> bool:
        """Returns whether as many clients as ever are at work, and the first answers are behind them."""
        return self.result.served >= self.to_skip and self.begun < self.scenario.conversations

    def begin(self, at: float, *, warm: bool = False) -> None:
        conversation, work = self.begun, self.workload
        self.begun += 1
        if work.exact_turns:
            turns = int(work.turns)
            done = self.random.randrange(turns) if warm else 0  # a fleet that has been running
        else:
            turns, done = 1 + min(int(self.random.expovariate(1 / (work.turns - 0.5))), 20), 0
        self.turns_left[conversation] = turns - done
        self.context[conversation] = work.system_tokens + done * (work.tokens_in + work.tokens_out)
        heapq.heappush(self.events, (at, conversation, -1, 0, 0))
        if done:
            self.take(conversation % self.scenario.engines, conversation, 0, self.context[conversation], 0.0)

    def finish(self, now: float, conversation: int, engine: int, tokens: int) -> None:
        self.truth.rows[engine] -= 1
        self.truth.pinned[engine] -= tokens
        self.running[engine].discard(conversation)
        if self.is_counting:
            self.result.output_tokens += self.workload.tokens_out
        self.turns_left[conversation] -= 1
        pause = self.random.expovariate(1 / self.workload.pause)
        if self.turns_left[conversation]:
            heapq.heappush(self.events, (now + pause, conversation, -1, 0, 0))
            return
        del self.turns_left[conversation], self.context[conversation]
        if self.begun < self.scenario.conversations:
            self.begin(now + pause)

    # ------------------------------------------------------------------ one request

    def submit(self, now: float, conversation: int, *, retry: bool = False) -> None:
        work, result = self.workload, self.result
        before = self.context[conversation]
        system = -1 - self.system_of[conversation % 4096] if work.num_systems else 0
        prompt = before + work.tokens_in
        view = self.views[self.random.randrange(len(self.views))] if len(self.views) > 1 else self.views[0]
        if view is not self.truth and now - view.read_at >= self.scenario.delay:
            view.read(self.truth, now)
        while self.news and self.news[0][0] <= now:
            self.learn(*self.news.popleft()[1:])
        engine = self.route(now, view, conversation, system, prompt)
        hit = self.take(engine, conversation, system, prompt + work.tokens_out, now)
        hit = min(hit, prompt - 1) // BLOCK * BLOCK
        rows = int(self.truth.rows[engine])
        start = max(now, float(self.truth.busy_until[engine]))
        first = start + (prompt - hit) / PREFILL / prompt_share(rows)
        token = step_seconds(rows + 1) + (
            max(PROMPT_MS / 1e3, step_seconds(rows)) if first > now + 0.1 else 0.0
        )
        end = first + work.tokens_out * token
        self.truth.add(engine, first, prompt + work.tokens_out)
        if view is not self.truth:
            view.add(engine, first, prompt + work.tokens_out)
        self.running[engine].add(conversation)
        heapq.heappush(self.events, (end, conversation, engine, self.lives[engine], prompt + work.tokens_out))
        self.context[conversation] = before if retry else prompt + work.tokens_out
        result.served += not retry
        result.retried += retry
        if self.lost_at is not None and now < self.lost_at + 60:
            result.after_loss.append(first - now)
        if not self.is_counting:
            return
        result.requests += 1
        result.prompt_tokens += prompt
        result.hit_tokens += hit
        result.possible_tokens += min(before, prompt - 1) // BLOCK * BLOCK
        result.ttft.append(first - now)

    def route(self, now: float, view: View, conversation: int, system: int, prompt: int) -> int:
        """The place of the engine. Only engines that are up are chosen."""
        policy, count = self.scenario.policy, self.scenario.engines
        self.turn = (self.turn + 1) % count
        if policy == "round robin":
            while not self.is_up[self.turn]:
                self.turn = (self.turn + 1) % count
            return self.turn
        if policy == "power of two":
            one, two = (self.pick_up() for _ in range(2))
            pool = self.scenario.pool
            by_load = [cost(view.load(each, now, pool), prompt, 0) for each in (one, two)]
            return one if by_load[0] <= by_load[1] else two
        return self.exact(now, view, conversation, system, prompt)

    def pick_up(self) -> int:
        while True:
            engine = self.random.randrange(self.scenario.engines)
            if self.is_up[engine]:
                return engine

    def exact(self, now: float, view: View, conversation: int, system: int, prompt: int) -> int:
        hits = self.systems[-1 - system] if system else 0.0
        costs = view.costs(now, prompt, hits, self.scenario.pool)
        for engine, tokens in self.holders.get(conversation, {}).items():
            hit = min(tokens, prompt - 1) // BLOCK * BLOCK
            costs[engine] = cost(view.load(engine, now, self.scenario.pool), prompt, hit)
        if self.scenario.lost:
            costs[~self.is_up] = np.inf
        turn = self.turn
        late, early = turn + int(costs[turn:].argmin()), int(costs[: turn + 1].argmin())
        return late if costs[late] <= costs[early] else early

    # ------------------------------------------------------------------ the cache of an engine

    def take(self, engine: int, conversation: int, system: int, tokens: int, now: float) -> int:
        """Returns the tokens that are cached, and caches the request's."""
        cache = self.caches[engine]
        hit = cache.pop(conversation, 0)
        own = hit
        if system:
            length = self.workload.system_tokens
            known = cache.pop(system, 0)
            hit = max(hit, known)
            self.keep(engine, system, length, known, now)
        self.keep(engine, conversation, tokens, own, now)
        self.result.blocks_stored += self.is_counting * ((tokens - hit) // BLOCK)
        while self.used[engine] > self.scenario.pool:
            oldest = next(iter(cache))
            if oldest in self.running[engine] or oldest == conversation:
                break  # all that is left runs
            gone = cache.pop(oldest)
            self.used[engine] -= gone
            self.result.blocks_removed += self.is_counting * (gone // BLOCK)
            self.tell(now, oldest, engine, 0)
        return hit

    def keep(self, engine: int, key: int, tokens: int, before: int, now: float) -> None:
        self.caches[engine][key] = tokens
        self.used[engine] += tokens - before
        if tokens != before:
            self.tell(now, key, engine, tokens)

    def tell(self, now: float, key: int, engine: int, tokens: int) -> None:
        if self.scenario.policy != "exact":
            return
        if self.scenario.delay:
            self.news.append((now + self.scenario.delay, key, engine, tokens))
        else:
            self.learn(key, engine, tokens)

    def learn(self, key: int, engine: int, tokens: int) -> None:
        if key < 0:
            self.systems[-1 - key, engine] = tokens // BLOCK * BLOCK
        elif tokens:
            self.holders.setdefault(key, {})[engine] = tokens
        elif (found := self.holders.get(key)) is not None:
            found.pop(engine, None)
            if not found:
                del self.holders[key]

    def lose(self, now: float) -> None:
        """Engines die: their caches are gone, and the requests that ran there are sent again."""
        self.lost_at = now
        for engine in range(self.scenario.lost):
            for key in self.caches[engine]:
                self.tell(now, key, engine, 0)
            self.caches[engine].clear()
            self.used[engine] = 0
            self.lives[engine] += 1
            self.is_up[engine] = False
            for name in ("rows", "busy_until", "pinned"):
                getattr(self.truth, name)[engine] = 0
            heapq.heappush(self.events, (now + RESTART, -1, -2, engine, 0))
        for engine in range(self.scenario.lost):
            again, self.running[engine] = sorted(self.running[engine]), set()
            for conversation in again:
                self.context[conversation] -= self.workload.tokens_in + self.workload.tokens_out
                self.submit(now, conversation, retry=True)
                self.context[conversation] += self.workload.tokens_in + self.workload.tokens_out


# ---------------------------------------------------------------------- what a router needs


@dataclass(frozen=True)
class RouterCost:
    bytes_per_block: float  # in ``PrefixIndex``, one group
    us_per_block: float  # to read one that was added
    us_decode: float  # to decode one of an event of the gateway's contract
    stored_bytes: float  # of a block in an event of the gateway's contract, tokens included
    removed_bytes: float
    update_bytes: float  # of a block in Chorale's own ``EngineUpdate``, one group
    us_request: dict[int, float]  # by length of the prompt, ``engines`` indexes


def chain(prompt: list[int]) -> list[bytes]:
    hashes: list[bytes] = []
    extend_chain(hashes, salted_root(b"s" * 16, ""), array("i", prompt).tobytes(), 4 * BLOCK)
    return hashes


def random_hashes(count: int, seed: int) -> bytes:
    return np.random.default_rng(seed).bytes(16 * count)


def index_of(full: bytes, window: bytes = b"") -> PrefixIndex:
    return PrefixIndex(PrefixIndexState(b"s" * 16, BLOCK, WINDOW, BlockChanges(full, b"", window, b"")))


def seconds_of(work: Callable[[], object], rounds: int) -> float:
    found = []
    for _ in range(rounds):
        began = time.thread_time()
        work()
        found.append(time.thread_time() - began)
    return sorted(found)[len(found) // 2]


def measure_router(engines: int, blocks: int, lengths: tuple[int, ...]) -> RouterCost:
    """Measures the real structures: an index of ``blocks``, and a search in ``engines`` indexes."""
    index = index_of(random_hashes(blocks, 0))
    size = sys.getsizeof(index.full) + sum(map(sys.getsizeof, index.full))
    more = BlockChanges(random_hashes(256, 1), b"", b"", b"")
    less = BlockChanges(b"", more.full_added, b"", b"")
    both = seconds_of(lambda: (index.apply(more), index.apply(less)), 31)
    ids = np.random.default_rng(2).integers(0, 200_000, 256 * BLOCK).tolist()
    hashes = [int.from_bytes(each[-8:], "big") for each in chain(ids)]
    stored = {
        "type": "BlockStored", "block_hashes": hashes, "parent_block_hash": hashes[0], "token_ids": ids,
        "block_size": BLOCK, "lora_id": None, "medium": "GPU", "lora_name": None, "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
    }  # fmt: skip
    wire = msgspec.msgpack.encode(stored)
    removed = {"type": "BlockRemoved", "block_hashes": hashes, "medium": "GPU", "group_idx": 0}
    indexes = [index_of(random_hashes(500, seed)) for seed in range(engines)]
    times = {}
    for length in lengths:
        prompt = np.random.default_rng(length).integers(0, 200_000, length).tolist()
        joined = b"".join(chain(prompt))
        holder = index_of(joined, joined)
        request = GenerateRequest(request_id="r", prompt_token_ids=prompt)

        def route(request: GenerateRequest = request, holder: PrefixIndex = holder) -> int | None:
            search = PrefixSearch(request, [*indexes[1:], holder])
            while not search.advance(512):
                pass
            load, count = Load(1_000, 20, 10**6), len(request.prompt_token_ids)
            return choose([cost(load, count, hit) for hit in search.hits()], 0)

        assert route() == engines - 1
        times[length] = 1e6 * seconds_of(route, 9)
    return RouterCost(
        size / blocks,
        1e6 * both / 512,
        1e6 * seconds_of(lambda: msgspec.msgpack.decode(wire), 31) / 256,
        len(wire) / 256,
        len(msgspec.msgpack.encode(removed)) / 256,
        16.0,
        times,
    )


# ---------------------------------------------------------------------- the report


def row(name: str, result: Result) -> str:
    rate = result.output_tokens / max(result.seconds, 1e-9)
    return (
        f"{name:<34} {result.requests:>10,} {100 * result.hit_rate:>7.1f} {100 * result.optimum:>7.1f} "
        f"{1e3 * result.percentile(50):>9,.0f} {1e3 * result.percentile(99):>10,.0f} {rate:>12,.0f} "
        f"{1e6 * result.cpu / max(1, result.served):>6.1f}"
    )


HEAD = (
    f"{'':<34} {'requests':>10} {'hits %':>7} {'best %':>7} {'p50 ms':>9} {'p99 ms':>10} "
    f"{'output tok/s':>12} {'us/req':>6}"
)


def report_policies(engines: int, chats: int, agents: int) -> None:
    for work, count in ((AGENTIC, agents), (CHAT, chats)):
        print(
            f"\n{work.name}: {engines:,} engines, {count:,} conversations, {engines * work.clients:,} at once"
        )
        print(HEAD)
        for policy in ("round robin", "power of two", "exact"):
            result = Fleet(Scenario(policy, work, engines, count)).run()
            print(row(policy, result), flush=True)
            if policy == "exact":
                report_events(engines, result)


def report_events(engines: int, result: Result) -> None:
    each = engines * result.seconds
    stored, removed = result.blocks_stored / each, result.blocks_removed / each
    print(f"  an engine and second: {stored:,.1f} blocks stored, {removed:,.1f} removed, of one group")


def variants(engines: int, count: int) -> Iterator[tuple[str, Scenario]]:
    def scenario(**more: object) -> Scenario:
        return Scenario("exact", CHAT, engines, count, **more)  # type: ignore[arg-type]

    yield "exact", scenario()
    for delay in (0.1, 1.0, 5.0, 30.0):
        yield f"news after {delay:g} s", scenario(delay=delay)
    for routers in (4, 16):
        yield f"{routers} routers, news after 0.1 s", scenario(routers=routers, delay=0.1)
        yield f"{routers} routers, news after 1 s", scenario(routers=routers, delay=1.0)
    yield f"{max(1, engines // 100)} engines lost", scenario(lost=max(1, engines // 100))
    for policy in ("power of two", "exact"):
        yield f"{HOT.name}: {policy}", Scenario(policy, HOT, engines, count)


def report_variants(engines: int, count: int) -> None:
    print(f"\nchat: {engines:,} engines, {count:,} conversations; what the router knows, and when")
    print(HEAD)
    for name, scenario in variants(engines, count):
        result = Fleet(scenario).run()
        print(row(name, result), flush=True)
        if scenario.lost:
            p99 = 1e3 * float(np.percentile(np.frombuffer(result.after_loss, np.float32), 99))
            print(f"  {result.retried} requests sent again; p99 in the minute after the loss {p99:,.0f} ms")


def report_router(engines: int) -> None:
    blocks = POOL_TOKENS // BLOCK
    found = measure_router(engines, 200_000, (2_048, 16_384, 65_536))
    print(f"\nrouter: {engines:,} engines of {blocks:,} blocks ({BLOCK} tokens)")
    print(f"  PrefixIndex: {found.bytes_per_block:.0f} bytes a block and group; all engines, one group: "
          f"{found.bytes_per_block * blocks * engines / 2**30:,.1f} GiB")  # fmt: skip
    print(f"  reading news: {found.us_per_block:.2f} us a block; decoding the contract's events: "
          f"{found.us_decode:.2f}")  # fmt: skip
    print(f"  events of the gateway's contract: {found.stored_bytes:.1f} bytes a block stored, "
          f"{found.removed_bytes:.1f} removed; Chorale's own: {found.update_bytes:.0f}")  # fmt: skip
    for length, us in found.us_request.items():
        print(f"  a request of {length:,} tokens, of which one engine has all: {us:,.0f} us")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--engines", type=int, default=1_000)
    parser.add_argument("--chats", type=int, default=1_000_000, help="conversations of the chat workload")
    parser.add_argument("--agents", type=int, default=60_000, help="conversations of the agentic workload")
    parser.add_argument("--variants", type=int, default=150_000, help="conversations of each variant, on a "
                        "quarter of the engines")  # fmt: skip
    parser.add_argument("--part", choices=("all", "policies", "variants", "router"), default="all")
    given = parser.parse_args()
    if given.part in ("all", "policies"):
        report_policies(given.engines, given.chats, given.agents)
    if given.part in ("all", "variants"):
        report_variants(max(2, given.engines // 4), given.variants)
    if given.part in ("all", "router"):
        report_router(given.engines)


if __name__ == "__main__":
    main()
