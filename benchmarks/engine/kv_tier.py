"""Measures host memory for KV: a conversation that returns, many of them, and steps that evict pages.

    chorale bench make-checkpoint 20b FOLDER
    python -m benchmarks.engine.kv_tier FOLDER [--cases CASE ...] [--json FILE]

One engine runs all cases; its pool holds 20 conversations of the case ``many`` (20b: of 8,800 tokens).

return  ``LLM.generate`` of one prompt of ``--length`` tokens and one token: ``prefill`` seconds. Other
        prompts evict it. The same prompt again: ``back`` seconds. Medians of ``--runs`` conversations, after
        one that compiles and captures.
many    ``--conversations`` conversations, all seen before, return in random order, ``--concurrency`` at a
        time, each with 64 new tokens and 16 tokens of output: seconds, requests a second, time to first token
        from the moment when a client sends the request, and tokens found; with the tier and without.
decode  ``--rows`` rows decode over a pool of cached pages that the host does not have, so that each new block
        evicts one. Seconds of a step, alternately with the tier and without; ``ratio`` is the ratio of the
        medians. ``pages``: pages copied to the host per step.

"Without" is the same engine and pool with the saving and loading of pages switched off.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np

from chorale import LLM, SamplingParams
from chorale.engine.core import EngineCore
from chorale.engine.types import GenerateRequest, SamplingSpec
from chorale.runtime.sizing.memory import GIB

CASES = ("return", "many", "decode")
IN_POOL = 20  # conversations of the case ``many`` that fit into the pool


class Bench:
    """An engine whose host tier can be switched off."""

    def __init__(self, llm: LLM, given: argparse.Namespace) -> None:
        self.llm, self.given = llm, given
        self.core: EngineCore = llm._engine._core  # type: ignore[union-attr, assignment]
        self._engine: Any = self.core._engine
        self._tier, self._loads = self._engine.cache.tier, self._engine.loads
        self._rng = np.random.default_rng(1)
        self._count = 0

    def switch(self, *, on: bool) -> None:
        assert not self.core.has_work
        self._engine.cache.tier = self._engine.cache.pool._tier = self._tier if on else None
        self._engine.loads = self._loads if on else None

    def forget(self) -> None:
        """Empties the prefix indexes of the device and the host."""
        self.switch(on=True)
        self._engine.cache.forget_all()

    def prompt(self, length: int) -> list[int]:
        most = min(199_000, self.llm.info.vocab_size)
        return self._rng.integers(0, most, length).tolist()

    def generate(self, prompt: list[int]) -> tuple[float, list[int], int]:
        """Returns seconds, output tokens, and the number of cached prompt tokens."""
        params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False)
        began = time.perf_counter()
        (output,) = self.llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)
        seconds = time.perf_counter() - began
        return seconds, list(output.outputs[0].token_ids), output.num_cached_tokens

    def fill(self) -> None:
        """Fills the pool with pages that the host does not have."""
        block, blocks = self.llm.info.block_size, self.llm.info.num_blocks
        length = min(self.llm.info.max_model_len - 2, blocks * block // 4)
        for _ in range(8):
            self.generate(self.prompt(length))

    def play(self, prompts: list[list[int]], output: int, at_once: int) -> dict[str, Any]:
        """Runs all prompts, ``at_once`` at a time."""
        core, waiting, sent = self.core, list(reversed(prompts)), dict[str, float]()
        first: list[float] = []
        cached = 0
        began = time.perf_counter()
        while waiting or core.has_work:
            while waiting and len(sent) < at_once:
                self._count += 1
                spec = SamplingSpec(temperature=0.0, ignore_eos=True, max_tokens=output, seed=0)
                name = f"m{self._count}"
                sent[name] = time.perf_counter()
                core.add_request(
                    GenerateRequest(request_id=name, prompt_token_ids=waiting.pop(), sampling=spec)
                )
            chunks, now = core.step(), time.perf_counter()
            for chunk in chunks:
                if sent[chunk.request_id] > 0 and chunk.token_ids:
                    first.append(now - sent[chunk.request_id])
                    cached += chunk.num_cached_tokens
                    sent[chunk.request_id] = 0
                if chunk.finish_reason is not None:
                    assert chunk.finish_reason == "length", chunk
                    del sent[chunk.request_id]
        seconds = time.perf_counter() - began
        first.sort()
        return {
            "seconds": seconds,
            "requests_per_second": len(prompts) / seconds,
            "ttft_mean": statistics.mean(first),
            "ttft_p50": first[len(first) // 2],
            "ttft_p99": first[len(first) * 99 // 100],
            "cached_tokens": cached,
            "prompt_tokens": sum(map(len, prompts)),
        }

    def returning(self) -> dict[str, Any]:
        rows = []
        for number in range(self.given.runs + 1):
            prompt = self.prompt(self.given.length)
            prefill, _, cached = self.generate(prompt)
            assert cached == 0
            again, answer, _ = self.generate(prompt)  # the whole prompt is cached on the device
            self.fill()
            before = self.core.stats()
            back, tokens, cached = self.generate(prompt)
            after = self.core.stats()
            if cached < self.given.length - 2 * self.llm.info.block_size:
                raise SystemExit(f"only {cached} tokens returned: raise --host-gib ({self.given.host_gib:g})")
            assert tokens == answer, "another token after the return"
            loaded = after.host_bytes_loaded - before.host_bytes_loaded
            load = after.host_load_seconds - before.host_load_seconds
            if number:
                rows.append((prefill, again, back, cached, loaded, load))
        prefill, again, back, cached, loaded, load = (
            statistics.median(column) for column in zip(*rows, strict=True)
        )
        return {
            "length": self.given.length,
            "prefill": prefill,
            "from_the_device": again,
            "back": back,
            "share": back / prefill,
            "cached_tokens": cached,
            "gib_loaded": loaded / GIB,
            "load_seconds": load,
        }

    def many(self) -> dict[str, Any]:
        given, info = self.given, self.llm.info
        length = (info.num_blocks // IN_POOL - 3) * info.block_size
        talks = [self.prompt(length) for _ in range(given.conversations)]
        found: dict[str, Any] = {"length": length, "conversations": len(talks)}
        for name, on in (("with", True), ("without", False)):
            self.forget()
            self.switch(on=on)
            self.play(talks, 1, given.concurrency)
            again = [talk + self.prompt(64) for talk in talks]
            random.Random(7).shuffle(again)
            before = self.core.stats()
            found[name] = self.play(again, 16, given.concurrency)
            after = self.core.stats()
            found[name]["device_hits"] = after.prefix_cache_hits - before.prefix_cache_hits
            found[name]["host_hits"] = after.host_cache_hits - before.host_cache_hits
            found[name]["gib_saved"] = (after.host_bytes_saved - before.host_bytes_saved) / GIB
            found[name]["gib_loaded"] = (after.host_bytes_loaded - before.host_bytes_loaded) / GIB
            found[name]["dropped"] = after.host_pages_dropped - before.host_pages_dropped
            found[name]["loads"] = after.num_host_loads - before.num_host_loads
        self.forget()
        return found

    def decode_steps(self) -> tuple[float, float]:
        """Returns the mean seconds of a step in which every row decodes, and the pages saved in each."""
        core, rows, steps = self.core, self.given.rows, self.given.steps
        for _ in range(rows):
            self._count += 1
            spec = SamplingSpec(temperature=1.0, ignore_eos=True, max_tokens=steps, seed=self._count)
            prompt = self.prompt(self.given.context)
            core.add_request(
                GenerateRequest(request_id=f"d{self._count}", prompt_token_ids=prompt, sampling=spec)
            )
        seconds, count, saved = 0.0, 0, 0
        while core.has_work:
            before, began = core.stats().host_bytes_saved, time.perf_counter()
            chunks = core.step()
            took = time.perf_counter() - began
            if len(chunks) == rows and core.stats().last_step_tokens == rows:
                seconds, count = seconds + took, count + 1
                saved += core.stats().host_bytes_saved - before
        return seconds / count, saved / core.limits.page_bytes / count

    def decode(self) -> dict[str, Any]:
        found: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
        for number in range(self.given.runs + 1):
            for on in (True, False) if number % 2 else (False, True):
                self.forget()
                self.fill()
                self.switch(on=on)
                one = self.decode_steps()
                if number:
                    found[on].append(one)
        self.switch(on=True)
        on, off = (statistics.median(step for step, _ in found[each]) for each in (True, False))
        return {
            "rows": self.given.rows,
            "with": on,
            "without": off,
            "ratio": on / off,
            "pages": statistics.mean(pages for _, pages in found[True]),
            "all": {str(key): [step for step, _ in value] for key, value in found.items()},
        }


def pool_blocks(given: argparse.Namespace, block: int) -> int:
    """Returns the number of blocks of the pool, which is the same for all cases."""
    if given.blocks:
        return int(given.blocks)
    row = -(-(given.context + given.steps) // block) + -(-127 // block) + 1
    return max(2 * given.rows * row, (given.length // block + 10) * 5 // 4)


def open_engine(given: argparse.Namespace) -> LLM:
    block = given.block_size or (16 if given.device == "cpu" else 64)
    options = {
        "device": given.device,
        "block_size": block,
        "num_gpu_blocks_override": pool_blocks(given, block),
        "max_num_seqs": max(given.rows, given.concurrency),
        "kv_offloading_size": given.host_gib,
        "seed": 1,
    }
    return LLM(given.model, **options | given.options)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--cases", nargs="*", default=CASES, choices=CASES)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--host-gib", type=float, default=64.0)
    parser.add_argument("--length", type=int, default=65_000, help="tokens of the conversation that returns")
    parser.add_argument("--conversations", type=int, default=200)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--rows", type=int, default=128)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--steps", type=int, default=256)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--blocks", type=int, default=0)
    parser.add_argument("--block-size", type=int, default=0)
    parser.add_argument("--options", type=json.loads, default={}, help="more arguments of LLM, as JSON")
    parser.add_argument("--json", default="")
    return parser.parse_args()


def main() -> None:
    given = arguments()
    began = time.perf_counter()
    with open_engine(given) as llm:
        bench = Bench(llm, given)
        info = llm.info
        found: dict[str, Any] = {
            "model": given.model,
            "device": info.device,
            "blocks": info.num_blocks,
            "block_size": info.block_size,
            "host_pages": info.num_host_pages,
            "host_gib": info.host_kv_bytes / GIB,
            "start_seconds": time.perf_counter() - began,
            "startup": info.startup_seconds,
        }
        cases = {"return": bench.returning, "many": bench.many, "decode": bench.decode}
        for name in given.cases:
            found[name] = cases[name]()
            print(name, json.dumps(found[name]), flush=True)
    text = json.dumps(found, indent=1)
    print(text)
    if given.json:
        Path(given.json).write_text(text + "\n", "utf-8")


if __name__ == "__main__":
    main()
