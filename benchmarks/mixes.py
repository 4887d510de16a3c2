"""Bit equality of ``--batch-invariant``: random mixes of requests against each request alone.

    python -m benchmarks.mixes demo --requests 2000
    chorale bench make-checkpoint 20b FOLDER
    python -m benchmarks.mixes FOLDER --requests 10000 --seconds 550

``--distinct`` different requests run alone, one after the other, in an engine without a prefix cache. Then
they run in mixes, each in several, in random order and numbers, through engines with different settings
(``SETTINGS``): few rows, many rows, small chunks of prompts, cached prefixes, drafts, a pool so small that
requests are interrupted, and KV pages that come back from host memory. Tokens and all log-probabilities, also
those of prompts, are compared as bits. The last line counts the comparisons, the conditions and the
differences; the exit status is 1 if there are any. ``--ranks`` and ``--replicas`` add engines. ``--off`` runs
without the mode.
"""

from __future__ import annotations

import argparse
import json
import random
import struct
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from chorale import LLM, RequestOutput, SamplingParams

MOST_PROMPT, OUTPUT = 400, 32
DRAFTS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 2}
SETTINGS: dict[str, dict[str, Any]] = {
    "many rows": {},
    "few rows, small chunks": {"max_num_seqs": 3, "max_num_batched_tokens": 48},
    "drafts": {"speculative_config": DRAFTS, "max_num_seqs": 24},
    "small pool": {"max_num_seqs": 32, "num_gpu_blocks_override": 100, "block_size": 16},
    "host memory": {
        "num_gpu_blocks_override": 100, "block_size": 16, "kv_offloading_size": 0.2,
        "max_num_batched_tokens": 256,
    },
    "drafts, no graphs": {"speculative_config": DRAFTS, "enforce_eager": True, "max_num_batched_tokens": 160},
}  # fmt: skip


@dataclass(frozen=True)
class Request:
    prompt: list[int]
    sampling: dict[str, Any]


def make_requests(count: int, seed: int = 0, vocab: range = range(1000, 190_000)) -> list[Request]:
    """Returns random requests; many share the beginning of their prompts."""
    draw = random.Random(seed)
    prefixes = [
        draw.choices(vocab, k=draw.randrange(16, MOST_PROMPT // 2)) for _ in range(max(1, count // 8))
    ]
    made = []
    for _ in range(count):
        own = draw.choices(vocab, k=int(2 ** draw.uniform(0, 8)))
        prompt = own if draw.random() < 0.4 else draw.choice(prefixes) + own
        if draw.random() < 0.3:  # text that drafts find again
            prompt = (own[:12] * 40)[:MOST_PROMPT]
        made.append(Request(prompt[:MOST_PROMPT], _sampling(draw, vocab)))
    return made


def _sampling(draw: random.Random, vocab: range) -> dict[str, Any]:
    sampling: dict[str, Any] = {
        "seed": draw.randrange(2**32), "temperature": draw.choice([0.0, 0.7, 1.0, 1.3]), "ignore_eos": True,
        "max_tokens": draw.randrange(OUTPUT // 2, OUTPUT * 3 // 2), "logprobs": draw.choice([0, 0, 3, 20]),
        "detokenize": False,
    }  # fmt: skip
    kind = draw.randrange(8)
    if kind == 0:
        sampling |= {"top_p": 0.9, "top_k": 40}
    elif kind == 1:
        sampling |= {"min_p": 0.02, "top_p": 0.95}
    elif kind == 2:
        sampling |= {"presence_penalty": 0.5, "frequency_penalty": 0.3, "repetition_penalty": 1.1}
    elif kind == 3:
        sampling |= {"logit_bias": {draw.choice(vocab): 8.0}, "top_p": 0.8}
    elif kind == 4:
        sampling |= {"prompt_logprobs": 1}
    return sampling


Bits = tuple[tuple[int, ...], bytes]


def bits_of(output: RequestOutput) -> Bits:
    """Returns the tokens, and the bits of all log-probabilities with their token ids."""
    answer, found = output.outputs[0], b""
    if answer.error is not None:
        raise SystemExit(f"a request failed: {answer.error}")
    for position in [*(output.prompt_logprobs or []), *(answer.logprobs or [])]:
        for token, entry in (position or {}).items():
            found += struct.pack("<qdq", token, entry.logprob, entry.rank or 0)
    return tuple(answer.token_ids), found


def generate(llm: LLM, requests: Sequence[Request]) -> list[RequestOutput]:
    prompts: Any = [{"prompt_token_ids": each.prompt} for each in requests]
    return llm.generate(prompts, [SamplingParams(**each.sampling) for each in requests], use_tqdm=False)


def mixed(count: int, distinct: int, draw: random.Random) -> Iterator[list[int]]:
    """Yields numbers of requests that run together: ``count`` in all, a few or many at a time."""
    order = [number % distinct for number in range(count)]
    draw.shuffle(order)
    while order:
        size = min(len(order), int(2 ** draw.uniform(0, 7)))
        yield [order.pop() for _ in range(size)]


class Comparison:
    """The bits of each request alone, and what mixes differed in."""

    def __init__(self, requests: list[Request], until: float, report: Any = print) -> None:
        """``until``: ``time.monotonic`` after which nothing more is started."""
        self.requests, self.until, self._report = requests, until, report
        self.alone: list[Bits] = []
        self.seen: Counter[str] = Counter()

    def run_alone(self, llm: LLM) -> None:
        for number, request in enumerate(self.requests):
            if time.monotonic() > self.until:
                break
            self.alone.append(bits_of(generate(llm, [request])[0]))
            if number % 100 == 99:
                self._report(f"alone: {number + 1} of {len(self.requests)}")

    def run_mixes(self, llm: LLM, name: str, count: int, seed: int) -> None:
        done, draw = 0, random.Random(seed)
        for numbers in mixed(count, len(self.alone), draw):
            if time.monotonic() > self.until:
                break
            outputs = generate(llm, [self.requests[number] for number in numbers])
            for number, output in zip(numbers, outputs, strict=True):
                self._compare(name, number, output)
            done += len(numbers)
            if done * 10 // count != (done - len(numbers)) * 10 // count:
                self._report(f"{name}: {done} of {count}, {self.seen['different']} different so far")
        self.seen["preempted"] += _counter(llm, "num_preemptions")
        self.seen["accepted draft tokens"] += _counter(llm, "spec_decode_num_accepted_tokens")
        self.seen["tokens from host memory"] += _counter(llm, "external_prefix_cache_hits")

    def _compare(self, name: str, number: int, output: RequestOutput) -> None:
        self.seen["compared"] += 1
        self.seen["with a cached prefix"] += output.num_cached_tokens > 0
        found, expected = bits_of(output), self.alone[number]
        if found == expected:
            return
        self.seen["different"] += 1
        if self.seen["different"] <= 10:
            what = "log-probabilities only" if found[0] == expected[0] else "tokens"
            self._report(f"DIFFERENT: request {number} in {name}: {what}")


def _counter(llm: LLM, name: str) -> int:
    return sum(int(getattr(each, "value", 0)) for each in llm.get_metrics() if name in each.name)


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("model")
    options.add_argument("--requests", type=int, default=10_000, help="in all mixes together")
    options.add_argument("--distinct", type=int, help="different requests (default: an eighth)")
    options.add_argument("--seconds", type=float, default=float("inf"), help="time limit, loading included")
    options.add_argument("--options", type=json.loads, default={}, help="more arguments of LLM, as JSON")
    options.add_argument("--ranks", type=int, nargs="*", default=[], help="also with so many ranks")
    options.add_argument("--replicas", type=int, nargs="*", default=[], help="also with so many engines")
    options.add_argument("--settings", nargs="*", default=list(SETTINGS), choices=SETTINGS)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--off", action="store_true", help="without the mode")
    given = options.parse_args()
    began = time.monotonic()

    def report(text: str) -> None:
        print(f"{time.monotonic() - began:7.1f} s  {text}", flush=True)

    settings = {name: SETTINGS[name] for name in given.settings}
    settings |= {f"{count} ranks": {"tensor_parallel_size": count} for count in given.ranks}
    settings |= {f"{count} replicas": {"data_parallel_size": count} for count in given.replicas}
    usual = {"max_model_len": 512, "batch_invariant": not given.off} | given.options
    requests = make_requests(given.distinct or max(1, given.requests // 8), given.seed)
    comparison = Comparison(requests, began + given.seconds, report)
    with LLM(given.model, **usual, enable_prefix_caching=False) as llm:
        report("loaded")
        comparison.run_alone(llm)
    for number, (name, own) in enumerate(settings.items()):
        if time.monotonic() < comparison.until:
            with LLM(given.model, **usual | own) as llm:
                comparison.run_mixes(llm, name, -(-given.requests // len(settings)), given.seed + number)
    report(", ".join(f"{count} {name}" for name, count in comparison.seen.items()))
    sys.exit(1 if comparison.seen["different"] else 0)


if __name__ == "__main__":
    main()
