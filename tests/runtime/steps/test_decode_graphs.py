"""Decode steps in static memory, run on the CPU by a device whose "graph" is the step itself.

The path is that of a GPU (packing, dummy rows, buckets, sampling in the step); only the capture is missing.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from chorale.config.engine import EngineConfig
from chorale.engine.core import EngineCore
from chorale.engine.types import EARLY_STOPS, EngineLimits
from chorale.errors import ConfigError
from chorale.grammar.constraint import json_schema
from chorale.grammar.frames import Frames, turn_grammar
from chorale.harmony.render import ASSISTANT
from chorale.harmony.vocab import START
from chorale.kernels.adapters import NONE
from chorale.kernels.ops import Ops
from chorale.kernels.reference.ops import REFERENCE_OPS
from chorale.machine.hardware import Hardware
from chorale.measure.bench.checkpoint_writer import write_random_checkpoint
from chorale.model.config import ModelConfig
from chorale.model.config_writer import make_config
from chorale.parallel.wire import WorkerCall
from chorale.runtime.build_worker import make_worker
from chorale.runtime.device import CpuDevice
from chorale.runtime.executor import LocalExecutor
from chorale.runtime.sampling.grammar import GrammarCache, GrammarRows
from chorale.runtime.sizing.graph_sizes import MIXED_TOKENS, chosen_sizes, context_sizes, pick, row_sizes
from chorale.runtime.sizing.resolve import resolve
from chorale.runtime.steps.decode_graphs import (
    DecodeGraphRunner,
)
from chorale.runtime.steps.mixed_graphs import MixedGraphRunner, num_appends
from chorale.runtime.warmup.captures import capture_first, draft_preparations, preparations
from chorale.runtime.worker import Worker
from chorale.serve.engine.build_rank import adapter_store, load_model, weight_target
from tests.support.device.soak import soak
from tests.support.engine.drafters import knowing
from tests.support.runtime import (
    Answer,
    check_preempted,
    make_engine,
    mixed_requests,
    random_prompt,
    request,
    run,
    tokens_of,
    with_drafter,
)

DEVICE = CpuDevice(Hardware("cpu", "stand-in", 2**34, 2**34), can_capture=True, overlap=True)


def graph_engine(folder: Path, ops: Ops = REFERENCE_OPS, **options: Any) -> EngineCore:
    settings = {"max_model_len": 1024, "max_num_seqs": 8, "num_gpu_blocks_override": 1024, "block_size": 16}
    config = EngineConfig(model=str(folder), **{**settings, **options})
    model_config = ModelConfig.load(folder)
    found = resolve(config, model_config, DEVICE.hardware, can_overlap=True, can_capture=True)
    assert found.graph_rows
    model = load_model(folder, weight_target(config, model_config, ops, found, DEVICE), found)
    adapters = adapter_store(config, model_config, ops, found, DEVICE)
    grammars = GrammarCache(model_config.vocab_size)
    worker = make_worker(model, found, DEVICE, GrammarRows(DEVICE, grammars), adapters=adapters)
    return EngineCore(found.limits, LocalExecutor(worker), grammars=grammars, adapters=adapters)


def worker_of(core: EngineCore) -> Worker:
    executor = core._executor
    assert isinstance(executor, LocalExecutor)
    assert executor._worker is not None
    return executor._worker


def decodes_of(core: EngineCore) -> DecodeGraphRunner:
    decodes = worker_of(core)._decode_graphs
    assert decodes is not None
    return decodes


def mixed_of(core: EngineCore) -> MixedGraphRunner:
    mixed = worker_of(core)._mixed_graphs
    assert mixed is not None
    return mixed


# ------------------------------------------------------------------ sizes


@pytest.mark.parametrize("most", [1, 2, 7, 8, 9, 60, 1000, 1024])
def test_sizes_waste_little(most: int) -> None:
    sizes = row_sizes(most)
    assert sizes[-1] == most
    assert list(sizes) == sorted(set(sizes))
    for rows in range(1, most + 1):
        size = pick(sizes, rows)
        assert rows <= size <= max(rows * 1.25, rows if rows <= 8 else 0)
    assert len(row_sizes(1024)) < 50


def test_requested_capture_sizes_are_used() -> None:
    assert chosen_sizes((4, 1, 4, 900), 64) == (1, 4, 64)
    for wrong in ((), (0, 1), (-1,)):
        with pytest.raises(ConfigError, match="cudagraph-capture-sizes"):
            chosen_sizes(wrong, 64)


def test_contexts() -> None:
    assert context_sizes(1, 700) == (512, 700)
    assert context_sizes(1, 131072) == (512, 1024, 2048, 131072)
    assert context_sizes(64, 131072) == (131072,)
    assert pick(context_sizes(1, 131072), 513) == 1024


# ------------------------------------------------------------------ the engine


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"async_scheduling": False, "cudagraph_capture_sizes": (3, 5)},
        {"max_num_batched_tokens": 7, "max_num_seqs": 3, "block_size": 4, "num_gpu_blocks_override": 4096},
        {"mixed_cuda_graphs": False},
    ],
    ids=["overlap", "serial, few sizes", "chunks, small blocks", "decode steps only"],
)
def test_equals_eager(checkpoint: Path, alone: dict[str, list[list[int]]], options: dict[str, Any]) -> None:
    core = graph_engine(checkpoint, **options)
    assert tokens_of(run(core, mixed_requests())) == alone
    assert tokens_of(run(core, mixed_requests())) == alone  # prompts from the cache
    assert {filtered for *_, filtered, _ in decodes_of(core)._graphs} == {False, True}
    assert (mixed_of(core).num_graphs >= 1) == options.get("mixed_cuda_graphs", True)


def test_min_tokens_needs_no_second_sampling(checkpoint: Path) -> None:
    """The ids that a greedy row would take may not come before its min_tokens, and end it then."""
    prompt = random_prompt(40, seed=3)
    free = run(
        make_engine(checkpoint), [request("a", prompt, temperature=0.0, max_tokens=12, ignore_eos=True)]
    )
    liked = tuple(dict.fromkeys(free["a"][0].token_ids))[:EARLY_STOPS]
    limits = {"stop_token_ids": liked, "min_tokens": 9, "max_tokens": 40, "ignore_eos": True}
    asked = [request("a", prompt, temperature=0.0, **limits), request("b", prompt, seed=5, **limits)]
    expected = tokens_of(run(make_engine(checkpoint), asked))
    core = graph_engine(checkpoint)
    assert tokens_of(run(core, asked)) == expected
    assert not worker_of(core)._buffers.rows.needs_resampling.any()
    for (tokens,) in expected.values():
        assert len(tokens) > 9
        assert not set(tokens[:9]) & set(liked)
    assert expected["a"][0][-1] in liked


def test_more_rows_than_the_largest_graph_run_without_one(
    checkpoint: Path, alone: dict[str, list[list[int]]]
) -> None:
    core = graph_engine(checkpoint, max_cudagraph_capture_size=2)
    assert tokens_of(run(core, mixed_requests())) == alone
    assert {size for size, *_ in decodes_of(core)._graphs} == {1, 2}


def test_a_batch_that_shrinks_borrows_graphs(checkpoint: Path) -> None:
    """Sizes that are passed in a few steps are not captured; one that stays in use is."""
    sizes = [row for row in row_sizes(24) if row > 8]
    assert sizes == [10, 12, 14, 16, 20, 24]
    asked = [request(f"r{n}", random_prompt(3, seed=n), seed=n, max_tokens=2 + n) for n in range(24)]
    options = {"max_num_seqs": 24, "enable_prefix_caching": False}
    expected = tokens_of(run(make_engine(checkpoint, **options), asked))
    core = graph_engine(checkpoint, **options)
    assert tokens_of(run(core, asked)) == expected
    assert {size for size, *_ in decodes_of(core)._graphs if size > 8} == {24, 14}  # 16 to 24 in the first
    asked = [request(f"r{n}", random_prompt(3, seed=n), seed=n, max_tokens=90) for n in range(18)]
    expected = tokens_of(run(make_engine(checkpoint, **options), asked))
    assert tokens_of(run(core, asked)) == expected
    assert {size for size, *_ in decodes_of(core)._graphs if size > 8} == {24, 20, 14}


def test_preempted_equals_alone(checkpoint: Path) -> None:
    roomy = make_engine(checkpoint, enable_prefix_caching=False)
    check_preempted(roomy, graph_engine(checkpoint, num_gpu_blocks_override=24, max_model_len=128))


def entries_of(answer: Answer) -> list[tuple[int, list[int]]]:
    return [(entry.token_id, entry.top_ids) for entry in answer.logprobs]


def test_logprobs_equal_eager(checkpoint: Path) -> None:
    asked = [
        request(f"r{i}", random_prompt(20, seed=i), seed=i, max_tokens=10, logprobs=None if i == 1 else 3)
        for i in range(3)
    ]
    eager, graph = run(make_engine(checkpoint), asked), run(graph_engine(checkpoint), asked)
    assert tokens_of(graph) == tokens_of(eager)
    for name in ("r0", "r2"):
        found, expected = graph[name][0], eager[name][0]
        assert entries_of(found) == entries_of(expected)
        pairs = zip(found.logprobs, expected.logprobs, strict=True)
        assert max(abs(a.logprob - b.logprob) for a, b in pairs) < 1e-4
    assert graph["r1"][0].logprobs == []


def test_dummies_write_only_their_own_block(checkpoint: Path) -> None:
    core = graph_engine(checkpoint, cudagraph_capture_sizes=(8,))
    decodes = decodes_of(core)
    for blocks in decodes._kv:
        blocks[:-1] = 7.0
    decodes.graph(8, 1024, False, NONE)
    mixed_of(core).graph(64, 4, NONE)
    assert all((blocks[:-1] == 7.0).all() for blocks in decodes._kv)
    assert all((blocks[-1, :, :, 0] != 0).any() for blocks in decodes._kv)


def test_more_blocks_than_a_graph_takes_are_appended_beforehand(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A long prefix of small blocks is found in the cache; the rest of the prompt is a small step."""
    core = graph_engine(checkpoint, block_size=4, num_gpu_blocks_override=1024)
    mixed, beforehand = mixed_of(core), []
    append = mixed._buffers.append_blocks
    monkeypatch.setattr(mixed._buffers, "append_blocks", lambda plan: (beforehand.append(plan), append(plan)))
    asked = [request("a", random_prompt(200), seed=1, max_tokens=8)]
    first = tokens_of(run(core, asked))
    assert not beforehand
    assert tokens_of(run(core, asked)) == first
    assert [plan.append_columns.shape[1] > num_appends(16, 4, 4) for plan in beforehand] == [True]


def test_grammars_bind_rows_that_were_sampled_freely_first(tmp_path: Path) -> None:
    """Rows with a grammar are sampled again from the step's logits; their neighbours are not touched."""
    sizes = {"layers": 2, "experts": 4, "hidden": 64, "inter": 64, "heads": 4, "kv_heads": 2, "head_dim": 16}
    folder = write_random_checkpoint(tmp_path / "model", make_config(**sizes), seed=1)
    schema = {"type": "object", "properties": {"a": {"enum": ["x", "yy"]}}, "required": ["a"]}
    grammar = turn_grammar(Frames(answer=json_schema(schema, "schema"), reasoning=(10, 3)))
    specs = [{"grammar": grammar, "ignore_eos": False}, {}, {"grammar": grammar, "temperature": 0.0}]
    asked = [
        request(str(n), [n, START, ASSISTANT], seed=n, max_tokens=30, **{"ignore_eos": True, **spec})
        for n, spec in enumerate(specs)
    ]
    options = {"max_model_len": 128, "num_gpu_blocks_override": 64, "max_num_seqs": 4}
    expected, found = (run(make(folder, **options), asked) for make in (make_engine, graph_engine))
    assert tokens_of(found) == tokens_of(expected)
    for name in ("0", "2"):
        assert GrammarCache(201088).matcher(grammar).consume_tokens(found[name][0].token_ids)
    assert not GrammarCache(201088).matcher(grammar).consume_tokens(found["1"][0].token_ids)


@pytest.mark.parametrize("options", [{}, {"async_scheduling": True, "max_num_batched_tokens": 40}])
def test_drafts_among_captured_steps(
    checkpoint: Path, alone: dict[str, list[list[int]]], options: dict[str, Any]
) -> None:
    """Steps with a draft run as mixed ones, the others as graphs; the last token passes between them."""
    known = {name: [Answer(tokens) for tokens in choices] for name, choices in alone.items()}
    core = graph_engine(checkpoint, **options)
    drafts = knowing(known, most=3, varies=True, wrong=0.2, vocab_size=512)
    drafted = with_drafter(core, drafts)
    assert tokens_of(run(drafted, mixed_requests())) == alone
    assert drafted.stats().num_accepted_tokens > 20
    assert decodes_of(core).num_graphs > 0
    assert mixed_of(core).num_graphs > 0


def test_random_traffic_through_graphs_leaks_nothing(checkpoint: Path) -> None:
    core = graph_engine(checkpoint, num_gpu_blocks_override=70, max_model_len=256, max_num_batched_tokens=128)
    soak(core, 60, seed=1, memory=lambda: 0)
    assert core.stats().num_preemptions > 0


def test_captured_at_the_start(checkpoint: Path) -> None:
    core = graph_engine(checkpoint, max_num_batched_tokens=300)
    found = resolve(
        EngineConfig(model=str(checkpoint), max_model_len=1024, max_num_seqs=8, max_num_batched_tokens=300),
        ModelConfig.load(checkpoint),
        DEVICE.hardware,
        can_capture=True,
    )
    said: list[str] = []
    executor = core._executor
    assert isinstance(executor, LocalExecutor)
    capture_first(executor, found, lambda phase, fraction=None, message="": said.append(message), budget=0)
    assert {size for size, *_ in decodes_of(core)._graphs} == {1, 2, 8}
    assert {tokens for tokens, *_ in mixed_of(core)._graphs} == {128}
    assert said[-1] == "prefill, 300 tokens, 4 rows"  # tried, not captured
    while core.use_idle_time():
        pass
    assert {size for size, *_ in decodes_of(core)._graphs} == set(range(1, 9))
    assert {size for size, _, filtered, _ in decodes_of(core)._graphs if filtered} == set(range(1, 9))
    expected = {(size, rows, 0) for size in MIXED_TOKENS[:9] for rows in (4, 16)}
    assert set(mixed_of(core)._graphs) == expected
    before = decodes_of(core).num_graphs
    asked = [request("a", random_prompt(40), max_tokens=6), request("b", [1], max_tokens=6, top_k=5)]
    run(core, asked)
    assert decodes_of(core).num_graphs <= before + 1  # nothing was missing but longer contexts with filters


def test_a_step_with_drafts_is_captured_without_filters(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = EngineConfig(model=str(checkpoint), max_num_seqs=2)
    model = ModelConfig.load(checkpoint)
    found = replace(resolve(config, model, DEVICE.hardware, can_capture=True), most_drafts=2)
    worker, captured = worker_of(graph_engine(checkpoint)), []
    graphs = SimpleNamespace(graph=lambda *sizes: captured.append(sizes))
    monkeypatch.setattr(worker, "_drafting", SimpleNamespace(graphs=graphs))
    for call, _ in draft_preparations(found).values():
        assert isinstance(call, WorkerCall)
        call(worker)
    assert {(rows, filtered) for rows, _, _, filtered in captured} == {(1, False), (2, False)}


def test_prompts_beside_many_streams_are_captured_early() -> None:
    """In the midst of service there is no idle moment, and a capture would hold up every stream."""
    large = EngineLimits(1000, 64, 1024, 8192, 4096)
    names = list(preparations(row_sizes(1024), large))
    busy = {f"prefill, {tokens} tokens, {rows} rows" for tokens in (1024, 1152, 1280) for rows in (64, 256)}
    assert set(names[: len(busy)]) == busy
    assert not busy & set(preparations(row_sizes(8), replace(large, max_num_seqs=8)))
    assert not busy & set(preparations(row_sizes(1024), replace(large, max_num_batched_tokens=1024)))


def test_a_row_without_a_token_ends_alone(checkpoint: Path) -> None:
    impossible = {"allowed_token_ids": (7,), "bad_words": ((7, 7),), "max_tokens": 5}
    asked = [request("good", [1, 2], seed=1, max_tokens=5), request("bad", [1, 2], **impossible)]
    answers = run(graph_engine(checkpoint), asked)
    assert answers["bad"][0].finish_reason == "error"
    assert answers["bad"][0].token_ids == [7]
    assert answers["good"][0].finish_reason == "length"
