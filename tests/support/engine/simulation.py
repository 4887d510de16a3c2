"""A seeded simulation of an engine: random arrivals, aborts and too few blocks. Each request must get what
``FakeModel.generate`` gives it alone. A failure can be repeated from its seed."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count

import numpy as np

from chorale.config.seeds import choice_seed
from chorale.engine.core import EngineCore
from chorale.engine.engine_state import Drafter
from chorale.engine.sequence import Sequence
from chorale.engine.types import (
    NOBODY,
    EngineLimits,
    EngineStats,
    GenerateRequest,
    Owner,
    SamplingSpec,
    TokenChunk,
)
from tests.support.engine.drafters import Future
from tests.support.engine.fake_executor import FakeExecutor, FakeModel, fake_experts
from tests.support.engine.integrity import check_integrity

VOCAB, EOS = 300, (7, 11)
OWNERS = (NOBODY, Owner("a"), Owner("b", 3.0))


class Ticker:
    """A clock that advances at every call."""

    def __init__(self) -> None:
        self._ticks = count(1)

    def __call__(self) -> float:
        return float(next(self._ticks))


@dataclass
class Record:
    """The output of one choice."""

    token_ids: list[int] = field(default_factory=list)
    chunks: list[TokenChunk] = field(default_factory=list)
    finish_reason: str | None = None


class Life:
    """One engine, its requests, and all its output."""

    def __init__(
        self,
        limits: EngineLimits,
        *,
        stop_probability: float = 0.04,
        make_drafter: Callable[[Future], Drafter] | None = None,
    ) -> None:
        """``make_drafter``: gets a function that returns the output of a sequence."""
        self.limits = limits
        self.model = FakeModel(
            vocab_size=limits.vocab_size,
            eos_token_ids=limits.eos_token_ids,
            stop_probability=stop_probability,
        )
        drafter = None if make_drafter is None else make_drafter(self._future)
        self.core = EngineCore(limits, FakeExecutor(limits, self.model), Ticker(), drafter=drafter)
        self.requests: dict[str, GenerateRequest] = {}
        self.records: dict[tuple[str, int], Record] = {}
        self.aborted: set[tuple[str, int]] = set()

    @property
    def max_len(self) -> int:
        return min(self.limits.max_model_len, self.core._engine.cache.capacity)

    def _future(self, sequence: Sequence) -> list[int]:
        prompt = sequence.request.request.prompt_token_ids
        return self.model.generate(prompt, sequence.sampling, sequence.seed, self.max_len)[0]

    def add(self, request: GenerateRequest) -> None:
        self.requests[request.request_id] = request
        for index in range(request.sampling.n):
            self.records[request.request_id, index] = Record()
        self.core.add_request(request)

    def abort(self, request_id: str, index: int | None = None) -> None:
        """Aborts a request, or only its choice ``index``."""
        self.core.abort(request_id, index)
        num_choices = self.requests[request_id].sampling.n
        self.aborted |= {(request_id, i) for i in (range(num_choices) if index is None else (index,))}
        check_integrity(self.core)

    def step(self) -> list[TokenChunk]:
        chunks = self.core.step()
        check_integrity(self.core)
        for chunk in chunks:
            record = self.records[chunk.request_id, chunk.index]
            assert record.finish_reason is None, f"{chunk} after the end"
            record.chunks.append(chunk)
            record.token_ids += chunk.token_ids
            record.finish_reason = chunk.finish_reason
        return chunks

    def run(self, max_steps: int = 100_000) -> None:
        """Steps until no work is left; fails after ``max_steps`` (a deadlock or a livelock)."""
        for _ in range(max_steps):
            if not self.core.has_work:
                return
            self.step()
        raise AssertionError(f"no end after {max_steps} steps: {self.core.stats()}")

    def unfinished_sample(self, rng: random.Random) -> str | None:
        """Returns a random request that has not ended, or None."""
        return rng.choice(sorted(self.core._engine.requests)) if self.core._engine.requests else None

    # ------------------------------------------------------------------ verdicts

    def check(self) -> None:
        """Asserts that every request got its tokens, and that everything was freed."""
        for (request_id, index), record in self.records.items():
            self._check_tokens(request_id, index, record)
            self._check_chunks(self.requests[request_id], record)
        life, stats = self.core._engine, self.core.stats()
        assert life.cache.pool.num_free == self.limits.num_blocks
        assert len(life.rows.free) == self.limits.max_num_seqs
        assert (stats.num_running, stats.num_waiting, stats.kv_blocks_used) == (0, 0, 0)
        assert stats.generation_tokens == sum(len(r.token_ids) for r in self.records.values())
        self._check_stats(stats)

    def _check_stats(self, stats: EngineStats) -> None:
        assert stats.prefix_cache_hits <= stats.prefix_cache_queries
        if not self.limits.enable_prefix_caching:
            assert stats.prefix_cache_queries == 0
        prompts = sum(
            len(request.prompt_token_ids)
            for request_id, request in self.requests.items()
            if self.records[request_id, 0].token_ids or self.records[request_id, 0].finish_reason == "length"
        )
        assert stats.prompt_tokens >= prompts

    def _check_tokens(self, request_id: str, index: int, record: Record) -> None:
        request = self.requests[request_id]
        seed = request.sampling.seed
        assert seed is not None
        tokens, reason = self.model.generate(
            request.prompt_token_ids, request.sampling, choice_seed(seed, index), self.max_len
        )
        if record.finish_reason == "abort":
            assert (request_id, index) in self.aborted
            assert record.token_ids == tokens[: len(record.token_ids)]
        else:
            assert (record.token_ids, record.finish_reason) == (tokens, reason), f"{request_id}/{index}"

    def _check_chunks(self, request: GenerateRequest, record: Record) -> None:
        first, last, sampling = record.chunks[0], record.chunks[-1], request.sampling
        assert all(chunk.timings is None for chunk in record.chunks[1:-1])
        assert last.timings is not None
        assert last.timings.last_token > 0
        assert all(chunk.num_cached_tokens == 0 for chunk in record.chunks[1:])
        assert first.num_cached_tokens < len(request.prompt_token_ids)
        if not self.limits.enable_prefix_caching or sampling.prompt_logprobs is not None:
            assert first.num_cached_tokens == 0
        assert (last.stop_token_id is not None) == (last.finish_reason == "stop")
        if last.finish_reason == "stop":
            assert last.stop_token_id == record.token_ids[-1]
        if sampling.prompt_logprobs is not None and record.token_ids:
            assert first.prompt_logprobs is not None
            assert first.prompt_logprobs[0] is None
            assert [p.token_id for p in first.prompt_logprobs[1:] if p] == request.prompt_token_ids[1:]
        for chunk in record.chunks:
            if sampling.logprobs is not None and chunk.token_ids:
                assert chunk.logprobs is not None
                assert [p.token_id for p in chunk.logprobs] == chunk.token_ids
            else:
                assert not chunk.logprobs
        self._check_experts(request, record)

    def _check_experts(self, request: GenerateRequest, record: Record) -> None:
        """Each position's experts come once, in order, up to the last token's predecessor."""
        parts = [part for chunk in record.chunks for part in chunk.routed_experts or ()]
        prompt, start = request.prompt_token_ids, request.sampling.routed_experts_start
        if self.limits.routed_experts is None or start is None or not (record.token_ids or parts):
            assert not parts
            return
        hashes = self.model.prefix_hashes(np.array(prompt + record.token_ids, np.int32))
        stop = len(prompt) + max(len(record.token_ids), 1) - 1
        assert b"".join(parts) == fake_experts(hashes[start:stop]).tobytes()


def random_requests(rng: random.Random, limits: EngineLimits, max_len: int) -> Iterator[GenerateRequest]:
    """Yields requests with shared prefixes of all lengths and every sampling field of the engine."""
    longest = max(1, min(max_len - 1, 90))
    stems = [[rng.randrange(VOCAB) for _ in range(longest)] for _ in range(4)]
    for number in count():
        stem = rng.choice(stems)[: rng.randint(0, longest)]
        tail = [rng.randrange(VOCAB) for _ in range(rng.choice((0, 1, 3, 20)))]
        prompt = (stem + tail)[:longest] or [5]
        want = rng.random()
        yield GenerateRequest(
            request_id=f"r{number}",
            prompt_token_ids=prompt,
            priority=rng.randrange(3),
            cache_salt=rng.choice(("", "", "salt")),
            owner=OWNERS[number % 3],
            is_batch=number % 5 == 0,
            sampling=SamplingSpec(
                n=rng.choice((1, 1, 1, 1, 2, 4)),
                seed=rng.randrange(2**40),
                temperature=rng.choice((0.0, 1.0)),
                max_tokens=rng.choice((0, 1, 2, 10, 40, None)) if want < 0.6 else rng.randrange(1, 30),
                min_tokens=rng.choice((0, 0, 0, 5)),
                ignore_eos=rng.random() < 0.1,
                stop_token_ids=rng.choice(((), (), (13,))),
                logprobs=rng.choice((None, None, None, 0, 2)),
                prompt_logprobs=rng.choice((None, None, None, None, 0)),
                routed_experts_start=(None, 0, len(prompt) // 2, len(prompt))[number % 4],
            ),
        )


def simulate(
    limits: EngineLimits,
    num_requests: int,
    seed: int,
    make_drafter: Callable[[Future], Drafter] | None = None,
) -> Life:
    """Runs bursts of arrivals, with about one abort for every eight requests, and checks the result."""
    rng = random.Random(seed)
    life = Life(limits, make_drafter=make_drafter)
    requests = random_requests(rng, limits, life.max_len)
    num_added = 0
    rate = rng.choice((0.3, 0.8))
    while num_added < num_requests or life.core.has_work:
        while num_added < num_requests and rng.random() < rate:
            life.add(next(requests))
            num_added += 1
        if rng.random() < 0.04 and (unfinished := life.unfinished_sample(rng)):
            num_choices = life.requests[unfinished].sampling.n
            life.abort(unfinished, rng.choice((None, rng.randrange(num_choices))))
        life.step()
    life.check()
    return life
