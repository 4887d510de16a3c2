"""build_engine: the phases of a start, the engine's info, dtypes and devices."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch

from chorale.config.engine import EngineConfig
from chorale.errors import ConfigError
from chorale.kernels.cpu.library import library
from chorale.machine.hardware import available_memory
from chorale.model.config import ModelConfig
from chorale.runtime.device import open_device
from chorale.runtime.sizing.resolve import default_threads
from chorale.serve.engine.build import build_engine
from tests.support.engine.integrity import check_integrity
from tests.support.runtime import make_engine, random_prompt, request, run

Floats = npt.NDArray[np.float64]


def test_the_info_and_the_phases_of_a_start_are_reported(checkpoint: Path) -> None:
    seen: list[tuple[str, float | None]] = []

    def progress(phase: str, fraction: float | None = None, message: str = "") -> None:
        seen.append((phase, fraction))

    config = EngineConfig(
        model=str(checkpoint), ops="reference", max_model_len=300, num_gpu_blocks_override=100, max_num_seqs=5
    )
    core, info = build_engine(config, progress)
    phases = ["download", "device", "load", "kv_pool", "warm_up"]
    assert list(dict.fromkeys(phase for phase, _ in seen)) == phases
    assert all(fraction is None or 0 <= fraction <= 1 for _, fraction in seen)
    assert list(info.startup_seconds) == phases
    assert (info.max_model_len, info.max_num_seqs, info.num_blocks) == (300, 5, 100)
    assert (info.block_size, info.dtype, info.ops, info.notes) == (16, "float32", "reference", ())
    assert info.parameters == ModelConfig.load(checkpoint).num_parameters
    assert info.num_kv_tokens == core._engine.cache.capacity
    check_integrity(core)
    assert core.stats().num_steps == 0
    core.shutdown()


def test_generation_config_sets_default_sampling_unless_disabled(checkpoint: Path, tmp_path: Path) -> None:
    for file in checkpoint.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "generation_config.json").unlink()
    (tmp_path / "generation_config.json").write_text(
        '{"temperature": 0.5, "top_k": 7, "eos_token_id": [5, 6]}'
    )
    small = {"num_gpu_blocks_override": 100, "max_model_len": 64}
    _, info = build_engine(EngineConfig(model=str(tmp_path), **small))
    assert info.default_sampling == {"temperature": 0.5, "top_k": 7}
    assert info.eos_token_ids == (5, 6)
    _, info = build_engine(EngineConfig(model=str(tmp_path), generation_config="none", **small))
    assert info.default_sampling == {}
    given = {"temperature": 0.1, "top_p": 0.9}
    _, info = build_engine(EngineConfig(model=str(tmp_path), override_generation_config=given, **small))
    assert info.default_sampling == {"temperature": 0.1, "top_k": 7, "top_p": 0.9}


@pytest.fixture(scope="module")
def exact(checkpoint: Path) -> Floats:
    """The scores of the reference in float32."""
    return scores(checkpoint, ops="reference")


@pytest.mark.parametrize(
    ("options", "tolerance"),
    [
        ({"kv_cache_dtype": "bfloat16"}, 0.01),
        ({"kv_cache_dtype": "fp8"}, 0.05),
        ({"dtype": "bfloat16", "kv_cache_dtype": "fp8_e4m3"}, 0.05),
        ({"dtype": "bfloat16"}, 0.05),
        ({"dtype": "bfloat16", "kv_cache_dtype": "float32"}, 0.05),
    ],
)
def test_other_dtypes_give_nearly_the_scores_of_float32(
    checkpoint: Path, exact: Floats, options: dict[str, str], tolerance: float
) -> None:
    """Compares medians, since rounding may change which experts the router selects."""
    difference = np.abs(exact - scores(checkpoint, ops="reference", **options))
    assert 0 < np.median(difference) < tolerance


@pytest.mark.skipif(library().functions is None, reason="the CPU kernels are not built")
def test_exact_cpu_precision_is_exact_with_bfloat16_weights(checkpoint: Path, exact: Floats) -> None:
    """Large models have bfloat16 weights. The KV cache is float32 unless ``kv_cache_dtype`` is given."""
    options = {"ops": "cpu", "cpu_precision": "exact", "dtype": "bfloat16"}
    assert np.abs(scores(checkpoint, **options) - exact).max() < 1e-3
    assert np.abs(scores(checkpoint, **options, kv_cache_dtype="bfloat16") - exact).max() > 1e-3


def scores(checkpoint: Path, **options: str) -> Floats:
    """Returns the log-probabilities of a prompt of 100 tokens."""
    each = request("p", random_prompt(100, seed=1), max_tokens=1, prompt_logprobs=0)
    made = run(make_engine(checkpoint, **options), [each])["p"][0].prompt_logprobs
    found = np.array([entry.logprob for entry in made or () if entry])
    assert len(found) == 99
    return found


def test_a_missing_device_is_an_error(checkpoint: Path) -> None:
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="--device cuda"):
            open_device("cuda")
    assert open_device("cpu").hardware.kind == "cpu"
    assert 2**20 < available_memory() < 2**50
    with pytest.raises(ConfigError, match="triton"):
        build_engine(EngineConfig(model=str(checkpoint), ops="triton", device="cpu"))
    with pytest.raises(ConfigError, match="--moe-activation-dtype fp8 needs"):
        build_engine(EngineConfig(model=str(checkpoint), moe_activation_dtype="fp8", device="cpu"))


def test_a_small_model_leaves_a_core_to_the_http_side(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(8), raising=False)
    assert default_threads(50_000_000) == 7
    assert default_threads(20_000_000_000) == 8
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(1), raising=False)
    assert default_threads(50_000_000) == 1
