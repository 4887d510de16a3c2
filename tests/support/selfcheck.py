"""The self-check on small checkpoints: a machine, faulty ops, and the output of a faulty engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from chorale.config.engine import EngineConfig
from chorale.engine.core import EngineCore
from chorale.engine.types import GenerateRequest, SamplingSpec
from chorale.kernels.ops import AttentionMeta, AttentionShape, ExpertTensors, Ops
from chorale.kernels.reference.ops import REFERENCE_OPS
from chorale.measure.selfcheck.check import Plan
from chorale.measure.selfcheck.device.machine import Machine
from chorale.measure.selfcheck.recorded import Draw, Position, Recording, Sequence
from chorale.model.checkpoint import Checkpoint
from chorale.model.config import ModelConfig
from chorale.serve.engine import build_rank
from tests.support.runtime import make_engine, run


def machine_of(
    folder: Path, ops: Ops = REFERENCE_OPS, recording: Recording | None = None, **fields: Any
) -> Machine:
    model = ModelConfig.load(folder)
    settings: dict[str, Any] = {
        "dtype": torch.float32,
        "kv_dtype": torch.float32,
        "max_model_len": 1024,
        **fields,
    }
    return Machine(
        plan=Plan((), EngineConfig(), quick=True, recording=recording or Recording()),
        folder=folder,
        model=model,
        checkpoint=Checkpoint(folder, model),
        device=torch.device("cpu"),
        ops=ops,
        block_size=16,
        **settings,
    )


# ---------------------------------------------------------------------- faults in code


def _sink_left_out() -> Ops:
    """Leaves the sinks out in one layer, the second whose attention is computed."""
    seen: list[float] = []

    def attention(q: Any, sinks: torch.Tensor, cache: Any) -> torch.Tensor:
        key = float(sinks.sum())
        if key not in seen:
            seen.append(key)
        lost = sinks - 1e30 if key in seen[1:2] else sinks
        return REFERENCE_OPS.attention(q, lost, cache)

    return replace(REFERENCE_OPS, attention=attention)


def _window_one_less() -> Ops:
    def plan(meta: AttentionMeta, shape: AttentionShape, block_size: int) -> Any:
        less = replace(shape, sliding_window=shape.sliding_window - 1)
        return REFERENCE_OPS.plan_attention(meta, less, block_size)

    return replace(REFERENCE_OPS, plan_attention=plan)


def _expert_scale() -> Ops:
    """Changes the scales of one expert of each layer."""

    def pack(tensors: ExpertTensors) -> Any:
        assert tensors.down_scales is not None
        scales = tensors.down_scales.clone()
        scales[3] += 1
        return REFERENCE_OPS.pack_experts(replace(tensors, down_scales=scales))

    return replace(REFERENCE_OPS, pack_experts=pack)


def _half_swapped() -> Ops:
    """Swaps the halves of one rank's columns of the output projection, of two ranks."""

    def pack(weight: torch.Tensor, bias: torch.Tensor | None) -> Any:
        if weight.shape[0] < weight.shape[1]:  # [hidden, heads]
            size = weight.shape[1] // 4
            order = torch.arange(weight.shape[1])
            order[2 * size :] = torch.cat((order[3 * size :], order[2 * size : 3 * size]))
            weight = weight[:, order]
        return REFERENCE_OPS.pack_linear(weight, bias)

    return replace(REFERENCE_OPS, pack_linear=pack)


def _stale_page() -> Ops:
    """Block 2 of each block table still has the id of block 1."""

    def plan(meta: AttentionMeta, shape: AttentionShape, block_size: int) -> Any:
        tables = []
        for table in meta.block_tables:
            stale = table.clone()
            if table.shape[1] > 2:
                stale[:, 2] = stale[:, 1]
            tables.append(stale)
        return REFERENCE_OPS.plan_attention(
            replace(meta, block_tables=(tables[0], tables[1])), shape, block_size
        )

    return replace(REFERENCE_OPS, plan_attention=plan)


CODE_FAULTS: dict[str, Callable[[], Ops]] = {
    "sink_left_out": _sink_left_out,
    "window_one_less": _window_one_less,
    "expert_scale": _expert_scale,
    "half_swapped": _half_swapped,
    "stale_page": _stale_page,
}


@contextmanager
def engine_with(folder: Path, ops: Ops, **options: Any) -> Iterator[EngineCore]:
    """Yields an engine that computes with ``ops``."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build_rank, "select_ops", lambda *_, **__: ops)
        core = make_engine(folder, **options)
    try:
        yield core
    finally:
        core.shutdown()


def record(core: EngineCore, lengths: tuple[int, ...] = (12, 20, 28, 60, 200)) -> Recording:
    """Returns the recording that the check "record" gets from a server, made by an engine in this process."""
    generator = np.random.default_rng(0)
    prompts = {
        str(number): generator.integers(0, core.limits.vocab_size, n).tolist()
        for number, n in enumerate(lengths)
    }
    sampling = SamplingSpec(temperature=0.0, ignore_eos=True, max_tokens=8, logprobs=4, prompt_logprobs=4)
    found = _run(core, {name: (tokens, sampling) for name, tokens in prompts.items()})
    sequences = []
    for name, positions in found.items():
        tokens = prompts[name]
        generated = [each.token_ids[0] for each in positions if each.index >= len(tokens)]
        sequences.append(Sequence(name, [*tokens, *generated], len(tokens), positions))
    return Recording(sequences)


def draws(core: EngineCore) -> list[Draw]:
    """What "record" draws, likewise."""
    asked = {
        f"{temperature} {top_k}": (
            [5, 6, 7],
            SamplingSpec(
                temperature=temperature, top_k=top_k, seed=11, ignore_eos=True, max_tokens=48, logprobs=20
            ),
        )
        for temperature in (0.5, 1.0, 2.0)
        for top_k in (0, 20)
    }
    found = _run(core, asked)
    return [Draw(spec.temperature, 11, spec.top_k, found[name]) for name, (_, spec) in asked.items()]


def _run(core: EngineCore, asked: dict[str, tuple[list[int], SamplingSpec]]) -> dict[str, list[Position]]:
    """Returns the positions that have log-probabilities."""
    requests = [
        GenerateRequest(request_id=name, prompt_token_ids=t, sampling=s) for name, (t, s) in asked.items()
    ]
    found: dict[str, list[Position]] = {}
    for name, [answer] in run(core, requests).items():
        assert answer.error is None, answer.error
        begin = 0 if answer.prompt_logprobs is not None else len(asked[name][0])
        found[name] = []
        for index, each in enumerate([*(answer.prompt_logprobs or ()), *answer.logprobs], begin):
            if each is not None:
                named = {each.token_id: each.logprob}  # the token itself comes first
                named |= dict(zip(each.top_ids, each.top_logprobs, strict=True))
                found[name].append(Position(index, list(named), list(named.values())))
    return found
