"""Helpers of the runtime tests: engines with random checkpoints, ways to run requests, sampling batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from chorale.config.engine import EngineConfig
from chorale.engine.core import EngineCore
from chorale.engine.engine_state import Drafter
from chorale.engine.types import GenerateRequest, RowStart, SamplingSpec, TokenChunk, TokenLogprobs
from chorale.kernels.ops import SamplingInputs
from chorale.machine.hardware import Hardware
from chorale.measure.bench.checkpoint_writer import write_random_checkpoint
from chorale.model.config import ModelConfig
from chorale.model.config_writer import make_config
from chorale.runtime.device import CpuDevice
from chorale.runtime.sampling.batch import SamplingBatch
from chorale.runtime.sampling.row_state import RowSamplingState
from chorale.serve.engine.build import build_engine
from tests.support.device.model import SMALL, VOCAB
from tests.support.engine.integrity import check_integrity

SIZES: dict[str, Any] = {**SMALL, "sliding_window": 32}
CPU = CpuDevice(Hardware("cpu", "test", 2**34, 2**34))


def small_config() -> ModelConfig:
    return make_config(**SIZES)


def write_checkpoint(folder: Path, seed: int = 1) -> Path:
    return write_random_checkpoint(folder, small_config(), seed=seed)


def make_engine(folder: Path, drafter: Drafter | None = None, **options: Any) -> EngineCore:
    settings = {
        "max_model_len": 1024,
        "max_num_seqs": 8,
        "num_gpu_blocks_override": 1024,
        "block_size": 16,
        "num_threads": 1,  # test processes share the cores, so more threads would wait for each other
    }
    core, _ = build_engine(EngineConfig(model=str(folder), **{**settings, **options}))
    return core if drafter is None else with_drafter(core, drafter)


@contextmanager
def running(folder: Path, **options: Any) -> Iterator[EngineCore]:
    """An engine, which is shut down after the block."""
    core = make_engine(folder, **options)
    try:
        yield core
    finally:
        core.shutdown()


def with_drafter(core: EngineCore, drafter: Drafter | None, **limits: Any) -> EngineCore:
    """Returns another engine on the same device. ``limits``: changed limits."""
    grammars = core._pending_grammars._service
    adapters = core._adapters._service
    changed = replace(core.limits, **limits)
    return EngineCore(changed, core._executor, grammars=grammars, drafter=drafter, adapters=adapters)


@dataclass
class Answer:
    """The accumulated chunks of one choice."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    finish_reason: str | None = None
    error: str | None = None
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    routed_experts: bytes = b""

    def add(self, chunk: TokenChunk) -> None:
        self.token_ids += chunk.token_ids
        self.logprobs += chunk.logprobs or []
        self.prompt_logprobs = chunk.prompt_logprobs or self.prompt_logprobs
        self.finish_reason = chunk.finish_reason or self.finish_reason
        self.error = chunk.error or self.error
        self.num_cached_tokens = max(self.num_cached_tokens, chunk.num_cached_tokens)
        if chunk.timings is not None:
            self.num_preemptions = chunk.timings.num_preemptions
        self.routed_experts += b"".join(chunk.routed_experts or ())


def request(name: str, prompt: Sequence[int], **sampling: Any) -> GenerateRequest:
    spec = SamplingSpec(**{"ignore_eos": True, **sampling})
    return GenerateRequest(request_id=name, prompt_token_ids=list(prompt), sampling=spec)


def run(core: EngineCore, requests: Iterable[GenerateRequest]) -> dict[str, list[Answer]]:
    """Runs all requests together: request id -> an Answer per choice. Checks integrity after each step."""
    answers: dict[str, list[Answer]] = {}
    for each in requests:
        answers[each.request_id] = [Answer() for _ in range(each.sampling.n)]
        core.add_request(each)
    while core.has_work:
        for chunk in core.step():
            answers[chunk.request_id][chunk.index].add(chunk)
        check_integrity(core)
    assert core.stats().kv_blocks_used == 0
    return answers


SAMPLINGS: list[dict[str, Any]] = [
    {"temperature": 0.0, "max_tokens": 24},
    {"seed": 3, "max_tokens": 40},
    {"seed": 4, "max_tokens": 9, "top_p": 0.8, "temperature": 0.7},
    {"seed": 5, "max_tokens": 30, "top_k": 20, "min_p": 0.01},
    {
        "seed": 6,
        "max_tokens": 33,
        "presence_penalty": 1.0,
        "frequency_penalty": 0.5,
        "repetition_penalty": 1.2,
    },
    {"seed": 7, "max_tokens": 12, "logit_bias": {3: 5.0}, "bad_words": ((3, 3), (9,)), "min_tokens": 5},
    {"seed": 8, "max_tokens": 16, "allowed_token_ids": tuple(range(50))},
]


def mixed_requests() -> list[GenerateRequest]:
    lengths = [1, 31, 32, 33, 100, 161, 7]
    return [
        request(f"r{i}", random_prompt(length, seed=i), **sampling)
        for i, (length, sampling) in enumerate(zip(lengths, SAMPLINGS, strict=True))
    ]


def example_answers(core: EngineCore) -> dict[str, list[Answer]]:
    """Runs a greedy request and one with two hot choices, both with log-probabilities."""
    asked = [request("greedy", random_prompt(1, 70), temperature=0, max_tokens=20, logprobs=2)]
    asked.append(request("hot", random_prompt(2, 9), temperature=1.2, seed=4, n=2, max_tokens=20, logprobs=0))
    return run(core, asked)


def tokens_of(answers: dict[str, list[Answer]]) -> dict[str, list[list[int]]]:
    return {name: [answer.token_ids for answer in choices] for name, choices in answers.items()}


def each_alone(core: EngineCore, requests: Iterable[GenerateRequest]) -> dict[str, list[list[int]]]:
    """Returns the tokens of each request when nothing else runs."""
    found: dict[str, list[list[int]]] = {}
    for each in requests:
        found |= tokens_of(run(core, [each]))
    return found


def check_preempted(roomy: EngineCore, crowded: EngineCore) -> None:
    """All short prompts are admitted, and their outputs outgrow the pool of 24 blocks; penalties are counted
    again after preemption."""
    requests = [
        request(f"r{i}", random_prompt(10 + i, seed=i), **{**sampling, "max_tokens": 50})
        for i, sampling in enumerate(SAMPLINGS)
    ]
    answers = run(crowded, requests)
    assert tokens_of(answers) == each_alone(roomy, requests)
    assert sum(choices[0].num_preemptions for choices in answers.values()) >= 3


def random_prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB, length).tolist()


def sampling_batch(rows: RowSamplingState, chosen: Sequence[int], positions: Sequence[int]) -> SamplingBatch:
    """Returns a batch of the given rows, without block tables or a model."""
    numbers, places = np.array(chosen, np.int32), np.array(positions, np.int64)
    floats = torch.from_numpy(rows.floats(numbers))
    return SamplingBatch(
        state=rows,
        rows=numbers,
        positions=places,
        processors=rows.processors_of(numbers),
        row_index=torch.from_numpy(numbers).long(),
        inputs=SamplingInputs(
            torch.from_numpy(rows.keys(numbers, places)),
            floats[0],
            torch.from_numpy(numbers),
            floats[1:].t(),
            early_stops=torch.from_numpy(rows.early_stops(numbers, places)),
        ),
    )


def row_start(
    row: int,
    spec: SamplingSpec,
    prompt: Sequence[int],
    output: Sequence[int] = (),
    seed: int = 0,
    eos: tuple[int, ...] = (),
) -> RowStart:
    known = np.array([*prompt, *output], np.int32)
    return RowStart(row, known, len(prompt), spec, seed, eos)
