"""Shows that automatic sizing cannot run out of memory, with the largest steps that the flags allow.

    chorale bench make-checkpoint 20b FOLDER
    python -m benchmarks.gpu.pool_fill FOLDER [--gpu-memory-utilization 0.92 | --gib 15] [--max-model-len N]

The memory that a step needs besides the pool depends on its tokens and rows, the length of their contexts,
their sampling, and the graphs that exist; not on the contents of pages. So most of the pool is filled without
computation: the page tables of the scheduler and of the device are real, but the forward pass of these steps
is skipped, and keys and values of their tokens stay zero. Everything that affects memory is then computed, on
top of a full pool:

``longest``  as many sequences of ``max_model_len`` as fit into the pool; the last one's prompt is computed,
             chunk by chunk, while others decode; then decode steps with and without filters
``widest``   ``max_num_seqs`` rows whose contexts fill the pool; the last prompts are computed in steps of
             ``max_num_batched_tokens`` while others decode; then decode steps, also when the last
             page is taken and sequences are preempted
``special``  the same, each row with filters, penalties, a bias, 20 log-probabilities, and no ``max_tokens``
``burst``    steps of ``max_num_batched_tokens`` from ``max_num_seqs`` such prompts, each with a grammar too
             and log-probabilities of its prompt; then one prompt of that many tokens

All possible graphs are captured first: every size and context, with and without filters, and every mixed
step. Each line shows how full the pool was; the peak memory so far, of the whole device (with libraries and
graphs) and of the allocator; the limit of ``--gpu-memory-utilization``; and the retries (the allocator had to
release its cache to continue, which would be an error on a smaller device). ``OVER``: the peak exceeds the
limit, so the arithmetic was wrong, even if the device had room left. ``NOT FULL``: pool, rows, contexts or
steps did not reach the stage's target, so the stage proves nothing. A failed request or step ends the run.
Prefix caching is off; it decides which pages are used, not how many there are.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch

from chorale.config.engine import EngineConfig
from chorale.engine.core import EngineCore
from chorale.engine.types import FetchResult, GenerateRequest, SamplingSpec, StepPlan, StepResult
from chorale.grammar.constraint import json_schema
from chorale.grammar.frames import Frames, turn_grammar
from chorale.harmony.render import ASSISTANT
from chorale.harmony.vocab import START, VOCAB_SIZE
from chorale.machine.processes import tune_garbage_collector
from chorale.runtime.executor import LocalExecutor
from chorale.runtime.sizing.graph_sizes import MIXED_ROWS, context_sizes
from chorale.runtime.sizing.memory import GIB, KvGeometry
from chorale.runtime.worker import Worker
from chorale.serve.engine.build import build_engine
from tests.support.engine.integrity import check_integrity

REAL_STEPS = 12  # computed steps of each kind in a full pool (a quarter of them in ``special``)
MOST_STEPS = 400  # maximum of computed steps in a stage; about 50 are expected
LAST_PROMPTS = 8  # prompts of the widest batch that are computed
ANSWER = {
    "type": "array",
    "items": {"type": "integer"},
    "minItems": 1000,
}  # does not end within the measured steps


@dataclass(frozen=True, slots=True)
class SkippedStep:
    """A step without computation: samples token 5 everywhere."""

    plan: StepPlan

    def __call__(self) -> StepResult:
        sampled = self.plan.samples.astype(np.int32)
        return StepResult(self.plan.step_id, np.where(sampled, 5, -1)[:, None].astype(np.int32), sampled)


class SkippingExecutor:
    """An Executor that skips only the forward pass while ``skips`` is set."""

    def __init__(self, inner: LocalExecutor) -> None:
        self.inner = inner
        self.skips = False
        self.forget()

    def forget(self) -> None:
        """Resets the count and the largest tokens, rows and context of the computed steps."""
        self.num_real = self.most_tokens = self.most_rows = self.longest = 0

    def execute(self, plan: StepPlan) -> FetchResult:
        if not self.skips:
            self.num_real += 1
            self.most_tokens = max(self.most_tokens, plan.num_tokens)
            self.most_rows = max(self.most_rows, len(plan.rows))
            self.longest = max(self.longest, int((plan.num_computed + plan.num_new).max()))
            return self.inner.execute(plan)
        self.inner.prepare(partial(take_pages, plan=plan))
        return SkippedStep(plan)

    def use_idle_time(self) -> bool:
        return self.inner.use_idle_time()

    def shutdown(self) -> None:
        self.inner.shutdown()


def take_pages(worker: Worker, plan: StepPlan) -> None:
    """Does the same as ``Worker.run`` before the forward pass."""
    for start in plan.starts:
        worker._grammar.start(start)
    worker._buffers.start_rows(plan)
    worker._buffers.append_blocks(plan)


@dataclass
class Filler:
    """One engine, its requests and their progress. Raises ``SystemExit`` if one of them fails."""

    core: EngineCore
    executor: SkippingExecutor
    sent: int = 0
    began: set[str] = field(default_factory=set)  # requests that have a token
    ended: set[str] = field(default_factory=set)
    most_pages: int = 0

    def __post_init__(self) -> None:
        limits = self.core.limits
        self.geometry = KvGeometry(limits.block_size, 0, limits.sliding_window)
        self.reserve = limits.num_blocks // 100 + 1  # blocks that an admission leaves free

    def send(self, count: int, length: int, **sampling: Any) -> None:
        """Sends ``count`` prompts of ``length`` tokens."""
        ids = np.random.default_rng(length).integers(0, 199_000, length)
        ids[-2:] = (START, ASSISTANT)[-length:]  # a grammar may begin here
        prompt = np.minimum(ids, self.core.limits.vocab_size - 1).tolist()
        for _ in range(count):
            spec = SamplingSpec(temperature=1.0, ignore_eos=True, seed=self.sent, **sampling)
            self.core.add_request(
                GenerateRequest(request_id=str(self.sent), prompt_token_ids=prompt, sampling=spec)
            )
            self.sent += 1

    def run(self, until: Callable[[], bool]) -> None:
        while self.core.has_work and not until():
            for chunk in self.core.step():
                if chunk.error:
                    raise SystemExit(f"fill: a request failed: {chunk.error}")
                if chunk.token_ids:
                    self.began.add(chunk.request_id)
                if chunk.finish_reason:
                    self.ended.add(chunk.request_id)
            if self.executor.num_real > MOST_STEPS:
                raise SystemExit("fill: the pool has less room than expected, so the run shows nothing")
            self.most_pages = max(self.most_pages, self.core.stats().kv_blocks_used)

    def begin_all(self) -> None:
        self.run(lambda: len(self.began | self.ended) == self.sent)

    def steps(self, count: int) -> None:
        stop = self.core.stats().num_steps + count
        self.run(lambda: self.core.stats().num_steps >= stop)

    def skip_until_full(self) -> None:
        """Lets rows decode until the next steps need more pages than exist, or a row nears its end."""
        limits, preempted = self.core.limits, self.core.stats().num_preemptions
        rows, context = self.context()
        stop = self.core.stats().num_steps + max(0, limits.max_model_len - context - 3 * REAL_STEPS)
        few = 2 * rows // limits.block_size + 2
        self.executor.skips = True
        self.run(
            lambda: (
                self.free <= few
                or self.core.stats().num_preemptions > preempted
                or self.core.stats().num_steps >= stop
            )
        )
        self.executor.skips = False

    def is_shown(self, is_longest: bool) -> bool:
        """Returns whether the computed steps reached the stage's target."""
        limits, executor = self.core.limits, self.executor
        has_size = executor.longest > 0.9 * limits.max_model_len
        if not is_longest:
            has_size = executor.most_rows == limits.max_num_seqs
        has_tokens = executor.most_tokens > 0.9 * limits.max_num_batched_tokens
        return has_size and has_tokens and self.most_pages > 0.94 * limits.num_blocks

    @property
    def free(self) -> int:
        stats = self.core.stats()
        return stats.kv_blocks_total - stats.kv_blocks_used

    def context(self) -> tuple[int, int]:
        """Returns the number of running rows, and their longest context."""
        life = self.core._engine
        return len(life.running), max((int(life.rows.computed[row]) for row in life.running), default=0)

    def clear(self) -> None:
        """Ends all requests. Every page must be free afterwards."""
        for name in map(str, range(self.sent)):
            self.core.abort(name)
        while self.core.has_work:
            self.core.step()
        check_integrity(self.core)
        assert self.core.stats().kv_blocks_used == 0
        self.began, self.ended, self.sent = set(), set(), 0
        self.most_pages = 0
        self.executor.forget()


def longest(filler: Filler) -> None:
    limits, geometry = filler.core.limits, filler.geometry
    rows = (limits.num_blocks - filler.reserve) // geometry.blocks_for(limits.max_model_len)
    rows = max(1, min(rows, limits.max_num_seqs - 2))
    # A row decodes while other prompts are processed: it must not end before the last one has begun.
    steps = rows * limits.max_model_len // max(1, limits.max_num_batched_tokens - rows) + 4 * REAL_STEPS + 32
    length = max(limits.max_model_len - steps, limits.max_model_len // 2)
    filler.executor.skips = True
    filler.send(rows - 1, length)
    filler.begin_all()
    spare = filler.free - filler.reserve - geometry.blocks_for(limits.max_model_len) - rows - 32
    if (left := geometry.tokens_in(max(spare, 0))) > 2 * limits.block_size:
        filler.send(1, min(left, length))
        filler.begin_all()
    filler.executor.skips = False
    filler.steps(REAL_STEPS)
    filler.send(1, length, top_p=0.9)
    filler.begin_all()
    filler.steps(REAL_STEPS)


def widest(filler: Filler, steps: int, **sampling: Any) -> None:
    """Runs a batch of all rows. ``steps``: computed steps before and after the last prompts."""
    limits, geometry = filler.core.limits, filler.geometry
    rows = limits.max_num_seqs
    share = geometry.tokens_in((limits.num_blocks - filler.reserve) // rows)
    length = max(2, min(share * 9 // 10, limits.max_model_len // 2))
    last = min(LAST_PROMPTS, rows // 2)
    filler.executor.skips = True
    filler.send(rows - last, length, **sampling)
    filler.begin_all()
    growth = rows + 3 * REAL_STEPS * rows // limits.block_size  # blocks of the rows that decode meanwhile
    needed = last * (geometry.blocks_for(length + 2) + 1) + filler.reserve + growth
    most = limits.max_model_len - 4 * REAL_STEPS - length
    stop = filler.core.stats().num_steps + max(0, most // 2)
    filler.run(lambda: filler.free <= needed or filler.core.stats().num_steps >= stop)
    filler.executor.skips = False
    filler.steps(steps)
    filler.send(last, length, **({"top_p": 0.9} | sampling))
    filler.begin_all()
    filler.steps(steps)
    filler.skip_until_full()
    filler.steps(steps)


# All sampling options of a row. No ``max_tokens``: its history may grow to the model's length.
SPECIAL: dict[str, Any] = {
    "top_p": 0.9, "top_k": 50, "min_p": 0.01, "frequency_penalty": 0.3, "repetition_penalty": 1.1,
    "logit_bias": {9: 1.0}, "logprobs": 20,
}  # fmt: skip


def burst(filler: Filler) -> None:
    limits = filler.core.limits
    tokens = min(limits.max_num_batched_tokens, limits.max_model_len - 2)
    wishes = SPECIAL | {"prompt_logprobs": 20}
    if limits.vocab_size == VOCAB_SIZE:
        wishes["grammar"] = turn_grammar(Frames(answer=json_schema(ANSWER, "schema")))
    filler.send(limits.max_num_seqs, max(2, tokens // limits.max_num_seqs), **wishes)
    filler.begin_all()
    filler.steps(2)
    for name in range(filler.sent):
        filler.core.abort(str(name))
    filler.send(1, tokens, **wishes)
    filler.begin_all()


def capture_everything(core: EngineCore, executor: LocalExecutor) -> None:
    """Captures all possible graphs."""
    start, worker = time.perf_counter(), executor._worker
    while executor.use_idle_time():
        pass
    if worker is None or worker._decode_graphs is None or worker._mixed_graphs is None:
        return
    for size in worker._decode_graphs._sizes:
        for context in context_sizes(size, core.limits.max_model_len):
            for filtered in (False, True):
                executor.prepare(
                    partial(Worker.capture_decode, rows=size, longest=context, filtered=filtered)
                )
    for tokens in worker._mixed_graphs.sizes:
        for rows in MIXED_ROWS:
            executor.prepare(partial(Worker.try_size, num_tokens=tokens, rows=rows))
    print(
        f"{worker._decode_graphs.num_graphs} decode and {worker._mixed_graphs.num_graphs} mixed graphs, "
        f"{time.perf_counter() - start:.1f} s",
        flush=True,
    )


@dataclass(frozen=True, slots=True)
class Taken:
    """GiB in use on the device, and the allocator's maximum, retries and failures."""

    device: float
    total: float
    reserved: float
    allocated: float
    retries: int
    failures: int

    @staticmethod
    def now() -> Taken:
        if not torch.cuda.is_available():
            return Taken(0.0, 0.0, 0.0, 0.0, 0, 0)
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
        stats = torch.cuda.memory_stats()
        return Taken(
            (total - free) / GIB,  # nothing is released in between, so this is the maximum
            total / GIB,
            torch.cuda.max_memory_reserved() / GIB,
            torch.cuda.max_memory_allocated() / GIB,
            stats["num_alloc_retries"],
            stats["num_ooms"],
        )


def fill_pool(core: EngineCore, inner: LocalExecutor, share: float) -> bool:
    """Runs all stages. Returns whether memory stayed within ``share`` of the device, without a retry."""
    capture_everything(core, inner)
    core._executor = executor = SkippingExecutor(inner)
    filler = Filler(core, executor)
    stages: dict[str, Callable[[], None]] = {
        "longest": partial(longest, filler),
        "widest": partial(widest, filler, REAL_STEPS),
        "special": partial(widest, filler, REAL_STEPS // 4, **SPECIAL),
        "burst": partial(burst, filler),
    }
    good = True
    for name, stage in stages.items():
        start, preempted = time.perf_counter(), core.stats().num_preemptions
        stage()
        taken = Taken.now()
        within = taken.device <= share * taken.total and not taken.retries and not taken.failures
        shown = name == "burst" or filler.is_shown(name == "longest")
        good = good and within and shown
        print(
            f"fill {name}: {filler.most_pages:,} of {core.limits.num_blocks:,} pages; "
            f"{executor.num_real} real steps of up to {executor.most_tokens:,} tokens, "
            f"{executor.most_rows:,} rows, contexts of {executor.longest:,}; "
            f"{core.stats().num_preemptions - preempted} preemptions; "
            f"device {taken.device:.2f} of {share * taken.total:.2f} GiB allowed ({taken.total:.2f} in all), "
            f"reserved {taken.reserved:.2f}, allocated {taken.allocated:.2f}, {taken.retries} retries, "
            f"{taken.failures} failures{'' if within else ' OVER'}{'' if shown else ' NOT FULL'} "
            f"[{time.perf_counter() - start:.0f} s]",
            flush=True,
        )
        filler.clear()
    print("fill: within the limit" if good else "fill: NOT within the limit", flush=True)
    return good


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", help="a checkpoint; its weights may be random")
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.92)
    parser.add_argument("--gib", type=float, help="the same share, as GiB of the GPU's memory")
    parser.add_argument("--max-model-len", type=int)
    given = parser.parse_args()
    share = given.gpu_memory_utilization
    if given.gib is not None:
        share = given.gib * GIB / torch.cuda.mem_get_info()[1]
    config = EngineConfig(
        model=given.folder, device="cuda", enable_prefix_caching=False, gpu_memory_utilization=share,
        max_model_len=given.max_model_len,
    )  # fmt: skip
    torch.cuda.reset_peak_memory_stats()
    core, _ = build_engine(config)
    tune_garbage_collector()
    assert isinstance(core._executor, LocalExecutor)
    sys.exit(not fill_pool(core, core._executor, share))


if __name__ == "__main__":
    main()
