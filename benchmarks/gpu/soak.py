"""Serves random requests on one GPU and checks that nothing fails, no page is lost and memory stays flat.

    chorale bench make-checkpoint 20b FOLDER
    python -m benchmarks.gpu.soak FOLDER [--seconds 60] [--rows 128] [--blocks 1024]

Requests arrive in bursts, with pauses: prompts of 1 to 8,000 tokens and answers of 1 to 1,000 (both
log-uniform), a third of the prompts with a prefix that others share, some with several choices, filters,
penalties, biases, log-probabilities of answer or prompt, stop ids, grammars. One in ten or so is aborted at a
random moment. The pool is small, so that sequences are preempted. Checked while it runs: no request fails;
one that is not aborted gets all its tokens, log-probabilities are finite, answers under a schema are JSON;
pages, rows and queue agree (``check_integrity``, every 50 steps). At the end every page is free.

Memory is compared at two idle moments, after every row of the batch was taken by a plain request (rows keep
what their last request needed): after the first quarter, and at the end. Allocated may grow by 4 MiB;
reserved by 512 MiB (it depends on which requests happen to coincide); the resident memory of
the process by 256 MiB. ``--device cpu`` with a small checkpoint runs the same anywhere.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.gpu.pool_fill import capture_everything
from chorale.config.engine import EngineConfig
from chorale.engine.core import EngineCore
from chorale.engine.types import GenerateRequest, SamplingSpec, TokenChunk
from chorale.grammar.constraint import json_schema
from chorale.grammar.frames import Frames, turn_grammar
from chorale.harmony.render import ASSISTANT
from chorale.harmony.vocab import END, RETURN, START, VOCAB_SIZE, load_vocabulary
from chorale.machine.processes import tune_garbage_collector
from chorale.runtime.executor import LocalExecutor
from chorale.serve.engine.build import build_engine
from tests.support.engine.integrity import check_integrity

MIB = 2**20
SAMPLINGS: list[dict[str, Any]] = [
    {},
    {},
    {"temperature": 0.0},
    {"top_p": 0.9},
    {"top_k": 20, "min_p": 0.01},
    {"logprobs": 5},
    {"prompt_logprobs": 2},
    {"n": 3},
    {"frequency_penalty": 0.3, "presence_penalty": 0.1, "logit_bias": {5: 1.0}},
    {"repetition_penalty": 1.1, "top_p": 0.8, "logprobs": 20},
    {"allowed_token_ids": tuple(range(100, 400)), "min_tokens": 3},
    {"bad_words": ((7,), (8, 9)), "stop_token_ids": tuple(range(0, 500, 7))},
]
SCHEMA = {
    "type": "object",
    "properties": {
        "unit": {"enum": ["celsius", "kelvin"]},
        "values": {"type": "array", "items": {"type": "integer", "maximum": 9999}, "maxItems": 40},
        "ok": {"type": "boolean"},
    },
    "required": ["unit", "values", "ok"],
    "additionalProperties": False,
}


@dataclass
class Tracked:
    """The expected and the received output of a request."""

    choices: int
    max_tokens: int
    exact: bool  # ends by its length alone
    logprobs: bool
    grammar: bool
    got: list[list[int]]
    ended: int = 0
    aborted: bool = False


@dataclass
class Soak:
    core: EngineCore
    rng: np.random.Generator
    longest_prompt: int
    longest_answer: int
    most: int  # maximum of concurrent requests
    live: dict[str, Tracked] = field(default_factory=dict)
    count: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.vocab = min(self.core.limits.vocab_size, 199_000)
        self.beginnings = [self.tokens(self.length(self.longest_prompt // 2)) for _ in range(4)]
        self.has_grammars = self.core.limits.vocab_size == VOCAB_SIZE
        self.grammar, self.bias = "", {}
        if self.has_grammars:
            self.grammar = turn_grammar(Frames(answer=json_schema(SCHEMA, "schema"), reasoning=(20, 5)))
            self.vocabulary = load_vocabulary()
            closing = [self.vocabulary.encode(text)[0] for text in ("]", "}", '"', ",")]
            self.bias = dict.fromkeys(
                (*closing, END, RETURN), 11.0
            )  # a random model would not close brackets

    # ------------------------------------------------------------------ arrivals

    def length(self, most: int) -> int:
        return min(most, int(math.exp(self.rng.uniform(0.0, math.log(most + 1)))))

    def tokens(self, count: int) -> list[int]:
        found: list[int] = self.rng.integers(0, self.vocab, count).tolist()
        return found

    def send(self) -> None:
        """Sends a random request."""
        prompt = self.tokens(self.length(self.longest_prompt))
        if self.rng.random() < 0.3:
            prompt = (self.beginnings[int(self.rng.integers(4))] + prompt)[: self.longest_prompt]
        max_tokens = self.length(self.longest_answer)
        wishes = dict(SAMPLINGS[int(self.rng.integers(len(SAMPLINGS)))])
        is_bound = self.has_grammars and self.rng.random() < 0.1
        if is_bound:
            wishes = {"grammar": self.grammar, "logit_bias": self.bias, "ignore_eos": False}
            prompt, max_tokens = [*prompt, START, ASSISTANT], max(max_tokens, 300)
        self.add(prompt, max_tokens, **wishes)

    def add(self, prompt: list[int], max_tokens: int, **wishes: Any) -> None:
        name = f"s{self.count['requests']}"
        self.count["requests"] += 1
        spec = SamplingSpec(
            **({"ignore_eos": True, "seed": self.count["requests"], "max_tokens": max_tokens} | wishes)
        )
        self.live[name] = Tracked(
            choices=spec.n,
            max_tokens=min(max_tokens, self.core.limits.max_model_len - len(prompt)),
            exact=spec.ignore_eos and not spec.stop_token_ids,
            logprobs=spec.logprobs is not None,
            grammar=bool(spec.grammar),
            got=[[] for _ in range(spec.n)],
        )
        self.core.add_request(GenerateRequest(request_id=name, prompt_token_ids=prompt, sampling=spec))

    def abort_some(self) -> None:
        if self.live and self.rng.random() < 0.04:
            name = list(self.live)[int(self.rng.integers(len(self.live)))]
            self.live[name].aborted = True
            self.core.abort(name)

    # ------------------------------------------------------------------ results

    def step(self) -> None:
        if not self.core.has_work:
            self.core.use_idle_time()
            return
        for chunk in self.core.step():
            self.take(chunk)
        self.count["steps"] += 1
        if self.count["steps"] % 50 == 0:
            check_integrity(self.core)

    def take(self, chunk: TokenChunk) -> None:
        assert chunk.error is None, (chunk.request_id, chunk.error)
        tracked = self.live[chunk.request_id]
        tracked.got[chunk.index] += chunk.token_ids
        self.count["tokens"] += len(chunk.token_ids)
        if tracked.logprobs and chunk.token_ids:
            assert chunk.logprobs is not None
            assert all(-1e4 < entry.logprob < 1e-3 for entry in chunk.logprobs)
        if chunk.finish_reason is None:
            return
        self.count[f"ended by {chunk.finish_reason}"] += 1
        if chunk.finish_reason == "abort":
            assert tracked.aborted, chunk.request_id
        else:
            self.check(tracked, tracked.got[chunk.index], chunk.finish_reason)
        tracked.ended += 1
        if tracked.ended == tracked.choices:
            del self.live[chunk.request_id]

    def check(self, tracked: Tracked, tokens: list[int], finish: str) -> None:
        assert len(tokens) <= tracked.max_tokens
        if finish == "length" or tracked.exact:
            assert (len(tokens), finish) == (tracked.max_tokens, "length")
        if tracked.grammar and finish == "stop":
            text = self.vocabulary.decode(tokens[:-1]).rpartition("<|message|>")[2]
            assert set(json.loads(text)) == {"unit", "values", "ok"}, text
            self.count["answers under the schema"] += 1

    # ------------------------------------------------------------------ the run

    def serve(self, seconds: float) -> None:
        """Sends bursts, with a pause in every third period of five seconds. Waits until all have ended."""
        began = time.monotonic()
        due = began
        while (now := time.monotonic()) < began + seconds:
            if now >= due:
                due = now + float(self.rng.exponential(0.2))
                is_pause = int((now - began) / 5) % 3 == 2
                for _ in range(0 if is_pause else int(self.rng.geometric(1 / 15))):
                    if len(self.live) < self.most:
                        self.send()
            self.abort_some()
            self.step()
        self.drain()

    def drain(self) -> None:
        while self.core.has_work:
            self.step()
        assert not self.live, f"{len(self.live)} requests never ended"
        check_integrity(self.core)
        assert self.core.stats().kv_blocks_used == 0

    def settle(self) -> Taken:
        """Returns the memory in use once no row keeps state of an earlier request."""
        for _ in range(self.core.limits.max_num_seqs):
            self.add([1, 2, 3, 4], 2)
        self.drain()
        return Taken.now()


@dataclass(frozen=True)
class Taken:
    """Memory in use, in MiB."""

    allocated: float
    reserved: float
    host: float

    @staticmethod
    def now() -> Taken:
        gc.collect()
        status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        host = int(status["VmRSS"].split()[0]) / 1024
        if not torch.cuda.is_available():
            return Taken(0.0, 0.0, host)
        torch.cuda.synchronize()
        return Taken(torch.cuda.memory_allocated() / MIB, torch.cuda.memory_reserved() / MIB, host)

    def __str__(self) -> str:
        return f"allocated {self.allocated:,.1f}, reserved {self.reserved:,.0f}, host {self.host:,.0f} MiB"


def faults_of(before: Taken, after: Taken, core: EngineCore) -> list[str]:
    bounds = {"allocated": 4.0, "reserved": 512.0, "host": 256.0}
    found = [
        f"{name} grew by {getattr(after, name) - getattr(before, name):,.1f} MiB, more than {most:,.0f}"
        for name, most in bounds.items()
        if getattr(after, name) - getattr(before, name) > most
    ]
    if not core.stats().num_preemptions:
        found.append("nothing was preempted: the pool is too large to show anything")
    if torch.cuda.is_available():
        stats = torch.cuda.memory_stats()
        for name in ("num_alloc_retries", "num_ooms"):
            if stats[name]:
                found.append(f"{name}: {stats[name]}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", help="a checkpoint; its weights may be random")
    parser.add_argument("--seconds", type=float, default=60, help="seconds during which requests arrive")
    parser.add_argument("--rows", type=int, default=128)
    parser.add_argument("--blocks", type=int, default=1024, help="pages of the pool")
    parser.add_argument("--longest-prompt", type=int, default=8000)
    parser.add_argument("--longest-answer", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--serial", action="store_true")
    parser.add_argument("--moe-activation-dtype", default="auto")
    parser.add_argument("--kv-cache-dtype", default="auto")
    given = parser.parse_args()
    core, info = build_engine(
        EngineConfig(
            model=given.folder,
            device=given.device,
            async_scheduling=False if given.serial else None,
            max_num_seqs=given.rows,
            num_gpu_blocks_override=given.blocks,
            max_model_len=given.longest_prompt + given.longest_answer + 8,
            moe_activation_dtype=given.moe_activation_dtype,
            kv_cache_dtype=given.kv_cache_dtype,
        )
    )
    tune_garbage_collector()
    print(f"start-up, s: {info.startup_seconds}", flush=True)
    assert isinstance(core._executor, LocalExecutor)
    capture_everything(core, core._executor)
    rng = np.random.default_rng(given.seed)
    soak = Soak(core, rng, given.longest_prompt, given.longest_answer, most=2 * given.rows)
    began = time.monotonic()
    soak.serve(given.seconds / 4)
    before = soak.settle()
    print(f"after {time.monotonic() - began:.0f} s: {before}", flush=True)
    soak.serve(given.seconds * 3 / 4)
    after, stats = soak.settle(), core.stats()
    print(f"after {time.monotonic() - began:.0f} s: {after}")
    print(
        f"soak: {time.monotonic() - began:.0f} s, {soak.count['requests']:,} requests, "
        f"{stats.num_steps:,} steps, "
        f"{stats.prompt_tokens:,} prompt and {stats.generation_tokens:,} generated tokens, "
        f"{stats.prefix_cache_hits:,} from the prefix cache, {stats.num_preemptions:,} preemptions; "
        + ", ".join(f"{name}: {number:,}" for name, number in sorted(soak.count.items()) if " " in name)
    )
    faults = faults_of(before, after, core)
    print("soak: " + ("; ".join(faults) or "no error, no page lost, memory flat"))
    sys.exit(bool(faults))


if __name__ == "__main__":
    main()
