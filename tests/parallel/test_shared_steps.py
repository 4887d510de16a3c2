"""Ranks on the path of a GPU, as far as a CPU shows it: captured steps, and the Triton ops, interpreted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from chorale.config.engine import EngineConfig
from chorale.engine.core import EngineCore
from chorale.engine.types import FetchResult, StepPlan, StepResult
from chorale.kernels import select_ops
from chorale.machine.hardware import Hardware
from chorale.measure.bench.checkpoint_writer import write_random_checkpoint
from chorale.model.config import ModelConfig
from chorale.model.config_writer import make_config
from chorale.parallel.rank import Rank
from chorale.parallel.wire import WorkerCall
from chorale.runtime.build_worker import make_worker
from chorale.runtime.device import CpuDevice
from chorale.runtime.executor import LocalExecutor
from chorale.runtime.sampling.grammar import GrammarCache, GrammarRows
from chorale.runtime.sizing.resolve import resolve
from chorale.serve.engine.build_rank import load_model, weight_target
from tests.parallel.ranks import Meeting, ThreadCommunicator, shares_of
from tests.parallel.test_ranks import check_equal, common
from tests.parallel.test_shared_model import ODD
from tests.support.engine.drafters import knowing
from tests.support.runtime import make_engine, random_prompt, run, with_drafter

torch.set_num_threads(1)
GRAPHS = CpuDevice(Hardware("cpu", "stand-in", 2**34, 2**34), can_capture=True, overlap=True)


class ThreadedExecutor:
    """Runs each plan on all ranks at once; results are rank 0's."""

    def __init__(self, executors: list[LocalExecutor]) -> None:
        self.executors = executors
        self._pool = ThreadPoolExecutor(len(executors))

    def execute(self, plan: StepPlan) -> FetchResult:
        found = self._on_all(lambda executor: executor.execute(plan)())
        assert found is not None
        return lambda: found

    def prepare(self, call: WorkerCall) -> None:
        self._on_all(lambda executor: executor.prepare(call))

    def _on_all(self, work: Callable[[LocalExecutor], StepResult | None]) -> StepResult | None:
        first, *_ = self._pool.map(work, self.executors)
        return first

    def use_idle_time(self) -> bool:
        return False

    def shutdown(self) -> None:
        self._pool.shutdown()


def graph_engine(folder: Path, size: int) -> tuple[EngineCore, ThreadedExecutor]:
    """An engine whose decode and mixed steps run in static memory, on ``size`` ranks in threads."""
    config = EngineConfig(
        model=str(folder), max_model_len=512, max_num_seqs=8, block_size=16, tensor_parallel_size=size,
        num_gpu_blocks_override=512,
    )  # fmt: skip
    model_config = ModelConfig.load(folder)
    found = resolve(config, model_config, GRAPHS.hardware, can_overlap=True, can_capture=True)
    assert found.graph_rows
    meeting, executors = Meeting(size), []
    for share in shares_of(folder, size):
        rank = Rank(share, ThreadCommunicator(meeting, share.rank))
        ops = select_ops("reference", "cpu", rank=rank)
        model = load_model(folder, weight_target(config, model_config, ops, found, GRAPHS, share), found)
        rows = GrammarRows(GRAPHS, GrammarCache(model_config.vocab_size))
        executors.append(LocalExecutor(make_worker(model, found, GRAPHS, rows, rank)))
    executor = ThreadedExecutor(executors)
    return EngineCore(found.limits, executor), executor


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_captured_steps(odd: Path, size: int) -> None:
    requests = common(random_prompt(40, 6))
    alone = make_engine(odd, max_model_len=512)
    core, executor = graph_engine(odd, size)
    executor.prepare(WorkerCall("capture_decode", {"rows": 2, "longest": 512, "filtered": True}))
    executor.prepare(WorkerCall("try_size", {"num_tokens": 64, "rows": 4}))
    check_equal(run(core, requests), run(alone, requests))
    counts = set()
    for each in executor.executors:
        worker = each.worker
        assert worker._decode_graphs is not None
        assert worker._mixed_graphs is not None
        counts.add((worker._decode_graphs.num_graphs, worker._mixed_graphs.num_graphs))
    assert len(counts) == 1
    assert min(counts.pop()) > 0
    core.shutdown()


@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.slow), 4])
def test_drafts(odd: Path, size: int) -> None:
    """Each rank verifies a draft by itself, in captured forward passes and with each kind of sampling."""
    requests = common(random_prompt(40, 6))
    expected = run(make_engine(odd, max_model_len=512), requests)
    core, executor = graph_engine(odd, size)
    drafts = knowing(expected, most=5, varies=True, wrong=0.2, vocab_size=core.limits.vocab_size)
    drafted = with_drafter(core, drafts)
    check_equal(run(drafted, requests), expected)
    stats = drafted.stats()
    assert 20 < stats.num_accepted_tokens < stats.num_draft_tokens
    last_tokens = [each.worker._buffers.last_token[:-1].tolist() for each in executor.executors]
    assert all(tokens == last_tokens[0] for tokens in last_tokens)
    core.shutdown()


INTERPRETED = """
import json, sys
from tests.support.runtime import make_engine, request, run

size, by_expert = int(sys.argv[2]), sys.argv[4] == "whole experts"
core = make_engine(
    sys.argv[1], tensor_parallel_size=size, enable_expert_parallel=by_expert, ops=sys.argv[3],
    dtype="float32", logprobs_mode="processed_logprobs" if by_expert else "raw_logprobs",
)
prompts = {"long": list(range(30)), "short": list(range(7))}
requests = [
    request("greedy", prompts["long"], max_tokens=3, temperature=0, logprobs=3),
    request("filters", prompts["short"], max_tokens=3, seed=5, top_p=0.8, top_k=2, min_p=0.01, logprobs=3),
    request("penalties", prompts["short"], max_tokens=3, seed=6, presence_penalty=0.3),
    request("hot", prompts["short"], max_tokens=3, seed=7),
]
found = run(core, requests)
core.shutdown()
records = found["greedy"][0].logprobs + found["filters"][0].logprobs
print(json.dumps({
    "tokens": {name: answers[0].token_ids for name, answers in found.items()},
    "logprobs": [[record.logprob, *record.top_logprobs] for record in records],
}))
"""


@pytest.mark.slow
@pytest.mark.parametrize("cut", ["columns", "whole experts"])
def test_triton_ops_of_two_ranks(tmp_path: Path, cut: str) -> None:
    """Through Triton's interpreter: partial products, sums, the second rank's noise, filters over ranks."""
    sizes = {**ODD, "layers": 2, "experts": 5, "hidden": 64, "inter": 3 * 64, "heads": 8, "kv_heads": 4}
    folder = write_random_checkpoint(tmp_path / "small", make_config(**sizes), seed=3)

    def answers(size: int, ops: str) -> dict[str, object]:
        found = subprocess.run(
            (sys.executable, "-c", INTERPRETED, str(folder), str(size), ops, cut),
            env={**os.environ, "TRITON_INTERPRET": "1"},
            stdout=subprocess.PIPE,
            check=True,
            timeout=300,
        )
        result: dict[str, object] = json.loads(found.stdout)
        return result

    expected, found = answers(1, "reference"), answers(2, "triton")
    assert found["tokens"] == expected["tokens"]
    for one, other in zip(found["logprobs"], expected["logprobs"], strict=True):  # type: ignore[call-overload]
        assert one == pytest.approx(other, abs=1e-5)
