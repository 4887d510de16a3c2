"""The device checks pass on correct code and fail on each fault that is planted in it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from chorale.config.engine import EngineConfig
from chorale.kernels.cpu.library import library
from chorale.kernels.ops import AttentionMeta, AttentionShape, SamplingInputs
from chorale.kernels.reference import attention, moe
from chorale.kernels.reference import ops as reference_ops
from chorale.kernels.reference.ops import REFERENCE_OPS
from chorale.kernels.reference.sampling import sampling as reference_sampling
from chorale.kernels.reference.sampling.sampling import ReferenceSampler
from chorale.measure.bench.checkpoint_writer import write_random_checkpoint
from chorale.measure.selfcheck.check import Failed, Plan
from chorale.measure.selfcheck.device import sampling as sampling_check
from chorale.measure.selfcheck.device.kernels import check_kernels
from chorale.measure.selfcheck.device.logprobs import check_answers, check_logprobs, named_tokens
from chorale.measure.selfcheck.device.machine import open_machine
from chorale.measure.selfcheck.device.reference import Reference
from chorale.measure.selfcheck.device.sampling import check_sampling
from chorale.measure.selfcheck.recorded import Draw, Position, Recording, Sequence
from chorale.model import gpt_oss
from chorale.model.config_writer import make_config
from chorale.model.demo import ensure_demo
from chorale.model.gpt_oss import GptOss
from chorale.model.weights import Target, load_weights
from tests.support.device.paged import PagedRunner
from tests.support.runtime import SIZES, write_checkpoint
from tests.support.selfcheck import CODE_FAULTS, draws, engine_with, machine_of, record

WRONG_OP = {
    "sink_left_out": "attention is off",
    "window_one_less": "attention is off",
    "expert_scale": "moe is off",
    "half_swapped": "project_and_route: x is off",
    "stale_page": "attention is off",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("model") / "random")


@pytest.fixture(scope="module")
def recording(folder: Path) -> Recording:
    with engine_with(folder, REFERENCE_OPS) as core:
        return record(core)


@pytest.mark.parametrize("layout", ["published", "dense", "reference", "quark"])
def test_the_reference_layer_by_layer_equals_the_whole_model(layout: str, tmp_path: Path) -> None:
    """Odd sizes: 3 of 7 experts, 6 heads on 2 KV heads, and a window of 37 tokens."""
    sizes = SIZES | {"layers": 2, "experts": 7, "hidden": 96, "inter": 32, "heads": 6, "sliding_window": 37}
    config = replace(make_config(**sizes), num_experts_per_tok=3)
    write_random_checkpoint(tmp_path / "odd", config, layout=layout)  # type: ignore[arg-type]
    machine = machine_of(tmp_path / "odd")
    assert machine.model.num_experts_per_tok == 3
    weights = load_weights(tmp_path / "odd", Target(machine.model, REFERENCE_OPS, torch.float32))
    lengths = (90, 1, 50)
    tokens = [torch.randint(0, config.vocab_size, (length,)).tolist() for length in lengths]
    runner = PagedRunner(GptOss(machine.model, weights, REFERENCE_OPS, 128))
    expected = torch.cat([runner.run(ids) for ids in tokens]).log_softmax(-1)
    reference = Reference(machine)
    with torch.inference_mode():
        found = reference.logprobs(torch.cat(reference.run(tokens)), machine.read("head"))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("dtype", "kv_dtype"),
    [
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.float8_e4m3fn),
    ],
)
def test_correct_ops_pass(folder: Path, dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    machine = machine_of(folder, dtype=dtype, kv_dtype=kv_dtype)
    assert "within its limit" in check_kernels(machine).detail


@pytest.mark.skipif(library().functions is None, reason="the CPU kernels are not built")
@pytest.mark.parametrize("precision", ["exact", "int8"])
def test_the_precision_that_is_served_is_checked(folder: Path, precision: str) -> None:
    config = EngineConfig(model=str(folder), device="cpu", ops="cpu", max_model_len=1024)
    config = replace(config, cpu_precision=precision)
    machine = open_machine(Plan((), config, quick=True))
    facts = check_kernels(machine).facts
    assert (facts["moe"]["error"] > 1e-3) == (precision == "int8")


@pytest.mark.parametrize("fault", WRONG_OP)
def test_a_faulty_op_is_named(folder: Path, fault: str) -> None:
    ops = CODE_FAULTS[fault]()
    for dtype in (torch.float32, torch.bfloat16):
        with pytest.raises(Failed, match=WRONG_OP[fault]):
            check_kernels(machine_of(folder, ops, dtype=dtype, kv_dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("op", "named"),
    [("qkv_rope_cache", "qkv_rope_cache"), ("project_and_route", "norm"), ("lm_head", "lm_head")],
)
def test_an_op_with_a_wrong_epsilon_is_named(folder: Path, op: str, named: str, dtype: torch.dtype) -> None:
    right, index = getattr(REFERENCE_OPS, op), {"qkv_rope_cache": 3}.get(op, 4)

    def wrong(*given: Any) -> Any:
        return right(*given[:index], 10 * given[index], *given[index + 1 :])

    ops = replace(REFERENCE_OPS, **{op: wrong})
    with pytest.raises(Failed, match=rf"{named}.* is off .* small inputs"):
        check_kernels(machine_of(folder, ops, dtype=dtype, kv_dtype=dtype))


def test_an_op_that_fails_on_long_contexts_is_named(folder: Path) -> None:
    """The fault cuts each context to 4,096 tokens."""

    def plan(meta: AttentionMeta, shape: AttentionShape, block_size: int) -> Any:
        short = replace(meta, context_lens=meta.context_lens.clamp(max=4096))
        return REFERENCE_OPS.plan_attention(short, shape, block_size)

    machine = machine_of(folder, replace(REFERENCE_OPS, plan_attention=plan), max_model_len=8192)
    with pytest.raises(Failed, match=r"attention is off .* at 8,192 tokens"):
        check_kernels(machine)


def _scaled(factor: float, *, field: int | None = None) -> Callable[[Any], Any]:
    """Returns a change that multiplies a function's result, or one field of it, by ``factor``."""

    def wrapper(right: Any) -> Any:
        def wrong(*given: Any) -> Any:
            found = right(*given)
            if field is None:
                return found * factor
            return tuple(each * factor if index == field else each for index, each in enumerate(found))

        return wrong

    return wrapper


# Faults in code that the engine and the reference share: (module, name, change).
SHARED_FAULTS: dict[str, tuple[Any, str, Callable[[Any], Any]]] = {
    "norm epsilon times 10": (
        reference_ops,
        "rms_norm",
        lambda right: lambda x, w, eps: right(x, w, 10 * eps),
    ),
    "swiglu without its limit": (
        moe,
        "swiglu",
        lambda right: lambda both, limit, alpha: right(both, 1e9, alpha),
    ),
    "scores times 1.008": (attention, "_gather", _scaled(1.008, field=0)),
    "gates times 1.02": (reference_ops, "route", _scaled(1.02, field=2)),
    "logits times 1.001": (gpt_oss.GptOss, "logits", _scaled(1.001)),
}


@pytest.mark.parametrize("fault", SHARED_FAULTS)
def test_known_answers_reveal_faults_in_shared_code(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, name, change = SHARED_FAULTS[fault]
    monkeypatch.setattr(module, name, change(getattr(module, name)))
    with pytest.raises(Failed, match="off by"):
        check_answers(machine_of(ensure_demo()))


def test_log_probabilities_of_a_correct_engine_pass(folder: Path, recording: Recording) -> None:
    assert "are off by" in check_logprobs(machine_of(folder, recording=recording)).detail
    bfloat16 = {"dtype": torch.bfloat16, "kv_dtype": torch.bfloat16}
    with engine_with(folder, REFERENCE_OPS, dtype="bfloat16") as core:
        rounded = record(core)
    check_logprobs(machine_of(folder, recording=rounded, **bfloat16))
    with pytest.raises(Failed):  # errors of bfloat16 exceed the limits of float32
        check_logprobs(machine_of(folder, recording=rounded))


def test_rounding_is_measured_at_the_likeliest_rounded_tokens() -> None:
    position = Position(7, [3, 0, 1], [-1.0, -2.0, -3.0])
    rounded = torch.tensor([-9.0, -1.0, -2.0, -8.0, -3.0])
    assert named_tokens(rounded, position, is_decoded=True) == [1, 2, 4]
    assert named_tokens(rounded, position, is_decoded=False) == [3, 1, 2]


@pytest.mark.parametrize(
    ("fault", "dtype"), [("sink_left_out", "bfloat16"), ("stale_page", "bfloat16"), ("stale_page", "float32")]
)
def test_log_probabilities_reveal_a_faulty_engine(folder: Path, fault: str, dtype: str) -> None:
    with engine_with(folder, CODE_FAULTS[fault](), dtype=dtype) as core:
        faulty = record(core)
    types = {"dtype": getattr(torch, dtype), "kv_dtype": getattr(torch, dtype)}
    with pytest.raises(Failed, match="off by"):
        check_logprobs(machine_of(folder, recording=faulty, **types))


def test_a_faulty_sequence_is_named(folder: Path, recording: Recording) -> None:
    sequences = list(recording.sequences)
    first = sequences[0]
    moved = [
        Position(each.index, each.token_ids, [value - 0.02 for value in each.logprobs])
        for each in first.positions
    ]
    sequences[0] = Sequence(first.name, first.tokens, first.num_prompt, moved)
    with pytest.raises(Failed, match="0: off by"):
        check_logprobs(machine_of(folder, recording=Recording(sequences)))


def test_an_op_that_returns_nan_is_named(folder: Path) -> None:
    def lm_head(*given: object) -> torch.Tensor:
        logits = REFERENCE_OPS.lm_head(*given)  # type: ignore[arg-type]
        logits[0, 5] = torch.nan
        return logits

    with pytest.raises(Failed, match="lm_head is off by inf"):
        check_kernels(machine_of(folder, replace(REFERENCE_OPS, lm_head=lm_head)))


def test_sampled_tokens_of_a_correct_engine_pass(folder: Path, recording: Recording) -> None:
    with engine_with(folder, REFERENCE_OPS) as core:
        found = check_sampling(machine_of(folder, recording=Recording(recording.sequences, draws(core))))
    assert "40 greedy tokens are the likeliest, and 288 tokens sampled by seed" in found.detail


@pytest.mark.parametrize(("chosen", "words"), [(7, None), (200_013, "reserved")])
def test_reserved_ids_are_no_alternatives_and_no_choices(
    chosen: int, words: str | None, folder: Path
) -> None:
    """Random weights may make a reserved id the likeliest one."""
    positions = [Position(1, [chosen, 200_480, 9], [-2.0, -1.0, -3.0])]
    drawn = Draw(1.0, 3, 0, [Position(1, [7, 200_480], [0.0, 90.0])])
    recorded = Recording([Sequence("one", [5, chosen], 1, positions)], [drawn])
    machine = machine_of(folder, recording=recorded)
    if words is None:
        assert check_sampling(machine).detail.startswith("1 greedy tokens")
        return
    with pytest.raises(Failed, match=words):
        check_sampling(machine)


def _temperature_twice(patch: pytest.MonkeyPatch) -> None:
    right = ReferenceSampler.drawn

    def drawn(self: Any, scores: Any, given: SamplingInputs, needs: Any) -> torch.Tensor:
        return right(self, scores, replace(given, temperature=given.temperature**2), needs)

    patch.setattr(ReferenceSampler, "drawn", drawn)


def _no_top_k(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(reference_sampling, "filter_scores", lambda *given: None)


def _no_noise(patch: pytest.MonkeyPatch) -> None:
    """Removes the noise from the engine and from the check."""
    for module in (reference_sampling, sampling_check):
        right = module.gumbel_noise
        patch.setattr(module, "gumbel_noise", lambda *given, right=right: right(*given) * 0.0)


def _second_best(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ReferenceSampler, "decide", lambda self, scores, logits: scores.topk(2, -1).indices[:, 1])


@pytest.mark.parametrize(
    ("plant", "words"),
    [
        (_temperature_twice, "at temperature 0.5"),
        (_no_top_k, "with top_k 20"),
        (_no_noise, "standard deviations"),
        (_second_best, "greedy sampling chose"),
    ],
)
def test_sampled_tokens_reveal_a_faulty_sampler(
    plant: Callable[[pytest.MonkeyPatch], None], words: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with engine_with(folder, REFERENCE_OPS) as core:
        plant(monkeypatch)
        recorded = Recording(record(core, (12,)).sequences, draws(core))
    with pytest.raises(Failed, match=words):
        check_sampling(machine_of(folder, recording=recorded))
