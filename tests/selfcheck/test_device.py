"""The checks of the device: green on what is right, red on each planted fault, in code and in files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from chorale.kernels import mxfp4
from chorale.kernels.reference.ops import REFERENCE_OPS
from chorale.model.config_writer import make_config
from chorale.model.gpt_oss import GptOss
from chorale.model.weights import load_weights
from chorale.selfcheck.check import Failed, Skipped
from chorale.selfcheck.device import logprobs, sampling
from chorale.selfcheck.device.logprobs import check_logprobs
from chorale.selfcheck.device.long_attention import check_long_attention
from chorale.selfcheck.device.op_checks import check_ops
from chorale.selfcheck.device.plain import EXACT, Group, attend, rms_norm, run_plain
from chorale.selfcheck.device.plain_weights import decode
from chorale.selfcheck.recorded import Position, Recording, Sequence
from chorale.testing.checkpoint_writer import write_random_checkpoint
from tests.support.device.paged import PagedRunner
from tests.support.runtime import SIZES, write_checkpoint
from tests.support.selfcheck import CODE_FAULTS, engine_with, machine_of, record

WRONG_OP = {
    "sink_left_out": "attention is off",
    "window_one_less": "attention is off",
    "no_concentration": "rotary table is off",
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


def test_decoding_equals_the_kernels(folder: Path) -> None:
    blocks = torch.randint(0, 256, (7, 3, 16), dtype=torch.uint8)
    scales = torch.randint(0, 255, (7, 3), dtype=torch.uint8)
    assert torch.equal(decode(blocks, scales), mxfp4.dequantize(blocks, scales, torch.float32))
    scales[2, 1] = 255
    assert decode(blocks, scales).isnan().sum() == 32


@pytest.mark.parametrize("layout", ["published", "dense", "reference", "quark"])
def test_plain_model_equals_the_engines(layout: str, tmp_path: Path) -> None:
    """Odd sizes: 3 of 7 experts, 6 heads on 2, and a window that is no multiple of anything."""
    sizes = SIZES | {"layers": 2, "experts": 7, "hidden": 96, "inter": 32, "heads": 6, "sliding_window": 37}
    config = replace(make_config(**sizes), num_experts_per_tok=3)
    write_random_checkpoint(tmp_path / "odd", config, layout=layout)  # type: ignore[arg-type]
    machine = machine_of(tmp_path / "odd")
    assert machine.model.num_experts_per_tok == 3
    weights = load_weights(tmp_path / "odd", machine.model, REFERENCE_OPS, device="cpu", dtype=torch.float32)
    tokens = torch.randint(0, config.vocab_size, (90,)).tolist()
    expected = PagedRunner(GptOss(machine.model, weights, REFERENCE_OPS, 128)).run(tokens)
    source = machine.plain
    x = run_plain(machine.model, source.layers(), Group([source.embedded(tokens)], (EXACT,)))[0]
    normed = rms_norm(x, source.read(None, "final_norm").float(), machine.model.rms_norm_eps)
    found = normed @ source.read(None, "head").float().t()
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("dtype", "kv_dtype"),
    [
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.float8_e4m3fn),
    ],
)
def test_right_ops_are_right(folder: Path, dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    machine = machine_of(folder, dtype=dtype, kv_dtype=kv_dtype)
    assert "within its limit" in check_ops(machine).detail
    assert "1,024 tokens" in check_long_attention(machine).detail


@pytest.mark.parametrize("fault", CODE_FAULTS)
def test_ops_with_a_fault_are_named(folder: Path, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ops = CODE_FAULTS[fault](monkeypatch)
    for dtype in (torch.float32, torch.bfloat16):
        with pytest.raises(Failed, match=WRONG_OP[fault]):
            check_ops(machine_of(folder, ops, dtype=dtype, kv_dtype=dtype))


@pytest.mark.parametrize("fault", ["no_sinks", "window_one_less", "stale_page"])
def test_faults_of_attention_are_seen_by_the_needles(
    folder: Path, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def without_sinks(q: Any, kv: Any, sinks: Any, plan: Any, group: int) -> torch.Tensor:
        return REFERENCE_OPS.attention(q, kv, sinks - 1e30, plan, group)

    ops = replace(REFERENCE_OPS, attention=without_sinks)
    if fault in CODE_FAULTS:
        ops = CODE_FAULTS[fault](monkeypatch)
    with pytest.raises(Failed, match="attention is off"):
        check_long_attention(machine_of(folder, ops))


def test_log_probabilities_of_a_right_engine(folder: Path, recording: Recording) -> None:
    assert "are off by" in check_logprobs(machine_of(folder), recording).detail
    bfloat16 = {"dtype": torch.bfloat16, "kv_dtype": torch.bfloat16}
    with engine_with(folder, REFERENCE_OPS, dtype="bfloat16") as core:
        rounded = record(core)
    check_logprobs(machine_of(folder, **bfloat16), rounded)
    with pytest.raises(Failed):  # bfloat16 is no float32
        check_logprobs(machine_of(folder), rounded)


def test_rounding_is_measured_at_the_tokens_that_it_would_name(tmp_path: Path) -> None:
    """So many layers of random weights that an engine's likeliest tokens are mostly its rounding's choice."""
    config = make_config(**SIZES | {"layers": 96, "experts": 32, "hidden": 128, "inter": 128, "vocab": 5000})
    folder = write_random_checkpoint(tmp_path / "deep", config)
    with engine_with(folder, REFERENCE_OPS, dtype="bfloat16") as core:
        rounded = record(core, (20, 60))
    found = check_logprobs(machine_of(folder, dtype=torch.bfloat16, kv_dtype=torch.bfloat16), rounded)
    every = found.facts["all"]
    assert every["rounding"] > 0.8
    assert every["mean"] == pytest.approx(every["rounding"], rel=0.2)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("fault", CODE_FAULTS)
def test_an_engine_with_a_fault_is_seen(
    folder: Path, fault: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ops = CODE_FAULTS[fault](monkeypatch)
    with engine_with(folder, ops, dtype=dtype) as core:
        faulty = record(core)
    monkeypatch.undo()
    types = {"dtype": getattr(torch, dtype), "kv_dtype": getattr(torch, dtype)}
    with pytest.raises(Failed, match="off by"):
        check_logprobs(machine_of(folder, **types), faulty)


def test_a_fault_of_one_sequence_is_seen(folder: Path, recording: Recording) -> None:
    sequences = list(recording.sequences)
    first = sequences[0]
    moved = [
        Position(each.index, each.token_ids, [value - 0.02 for value in each.logprobs])
        for each in first.positions
    ]
    sequences[0] = Sequence(first.name, first.tokens, first.num_prompt, moved)
    with pytest.raises(Failed, match="0: off by"):
        check_logprobs(machine_of(folder), Recording(sequences))


def test_sequences_that_would_take_too_long_are_left_out(
    folder: Path, recording: Recording, monkeypatch: pytest.MonkeyPatch
) -> None:
    longest = max(len(sequence.tokens) for sequence in recording.sequences)
    monkeypatch.setattr(logprobs, "_LONG", longest - 1)
    count = sum(len(sequence.tokens) == longest for sequence in recording.sequences)
    assert "left out" not in check_logprobs(machine_of(folder), recording).detail
    monkeypatch.setattr(logprobs, "_LONG_SECONDS", 0.0)
    found = check_logprobs(machine_of(folder), recording).detail
    assert f"; {count} would take more than 0 s here and were left out" in found
    monkeypatch.setattr(logprobs, "_LONG", 0)
    with pytest.raises(Skipped, match="each recorded sequence"):
        check_logprobs(machine_of(folder), recording)


@pytest.mark.parametrize("window", [None, 5000, 100])
def test_plain_attention_over_several_pieces_of_keys(window: int | None) -> None:
    torch.manual_seed(1)
    length = 2 * 4096 + 77
    q, k, v = torch.randn(length, 2, 8), torch.randn(length, 1, 8), torch.randn(length, 1, 8)
    sinks = torch.tensor([0.5, 3.0])
    found = attend(q, k, v, sinks, window).view(length, 2, 8)
    for place in (0, 99, 100, 4095, 4096, 5000, length - 1):
        first = 0 if window is None else max(0, place - window + 1)
        seen = slice(first, place + 1)
        scores = (k[seen, 0].double() @ q[place].double().t() / 8**0.5).exp()  # [keys, 2]
        exact = scores.t() @ v[seen, 0].double() / (scores.sum(0) + sinks.double().exp()).unsqueeze(1)
        assert (found[place] - exact).abs().max() < 1e-5, place


def test_not_a_number_is_seen(folder: Path) -> None:
    def lm_head(*given: object) -> torch.Tensor:
        logits = REFERENCE_OPS.lm_head(*given)  # type: ignore[arg-type]
        logits[0, 5] = torch.nan
        return logits

    with pytest.raises(Failed, match="lm_head is off by inf"):
        check_ops(machine_of(folder, replace(REFERENCE_OPS, lm_head=lm_head)))


def test_sampling(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "draws at temperature 1" in sampling.check_sampling(machine_of(folder)).detail

    class SecondBest(sampling.ReferenceSampler):
        def __call__(
            self, logits: torch.Tensor, draws: object, last: torch.Tensor, out: torch.Tensor
        ) -> None:
            super().__call__(logits, draws, last, out)  # type: ignore[arg-type]
            out[-1] = last[-1] = logits[-1].topk(2).indices[1]

    with pytest.raises(Failed, match="greedy sampling, 1 rows"):
        sampling.check_sampling(machine_of(folder, replace(REFERENCE_OPS, make_sampler=SecondBest)))
