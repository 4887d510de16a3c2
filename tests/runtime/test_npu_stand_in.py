"""``--device npu`` with a stand-in for torch_npu (``tests/support/stand_in``), whose tensors are its own.

No NPU was ever used: these tests see tensors on the wrong device, and the seam, not what torch_npu supports.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from torch.utils import backend_registration

from chorale.cli.main import main
from chorale.config.engine import EngineConfig
from chorale.errors import ConfigError
from chorale.machine.hardware import Hardware
from chorale.model.config_writer import SHAPES, make_config
from chorale.runtime.device import open_device
from chorale.runtime.sizing.memory import weight_bytes
from chorale.runtime.sizing.resolve import resolve
from tests.support import ROOT
from tests.support.stand_in.generate import generate

STAND_IN = ROOT / "tests" / "support" / "stand_in"
needs_backend = pytest.mark.skipif(
    not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"),
    reason="this torch has no devices that are written in Python",
)


@pytest.fixture(scope="module")
def exact() -> dict[str, Any]:
    return generate(device="cpu", num_threads=1)


@needs_backend
@pytest.mark.timeout(300)
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_an_npu_gives_the_tokens_of_a_cpu(ranks: int, exact: dict[str, Any]) -> None:
    """Seeds, filters, a grammar, penalties and log-probabilities; of two ranks, over a group of "HCCL"."""
    options = json.dumps({"device": "npu", "tensor_parallel_size": ranks})
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.stand_in.generate", options],
        env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{STAND_IN}", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["tokens"] == exact["tokens"]
    assert len(found["scores"][1]) == 5
    for own, others in zip(found["scores"][1], exact["scores"][1], strict=True):
        assert own == pytest.approx(others, abs=1e-4)
    assert "Chorale has never run on an Ascend NPU" in done.stderr


def test_a_package_that_cannot_be_loaded_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch_npu is without CANN."""
    (tmp_path / "torch_npu.py").write_text("raise ImportError('libhccl.so: cannot open shared object file')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError) as error:
        open_device("npu")
    expected = "--device npu: torch_npu cannot be loaded (is CANN set up?): libhccl.so"
    assert error.value.message.startswith(expected)


def test_the_weights_are_decoded_and_refused_where_they_do_not_fit() -> None:
    model = make_config(**SHAPES["20b"])
    npu = Hardware("npu", "910B", 64 * 2**30, 63 * 2**30)
    assert weight_bytes(model, "bfloat16", decoded=True) == 2 * model.num_parameters
    found = resolve(EngineConfig(), model, npu)
    room = found.limits.num_blocks * found.geometry.bytes_per_block
    same = EngineConfig(max_num_batched_tokens=found.limits.max_num_batched_tokens)
    assert found.limits.max_num_batched_tokens == 2048
    gpu = resolve(same, model, Hardware("cuda", "GPU", 64 * 2**30, 63 * 2**30))
    packed = gpu.limits.num_blocks * gpu.geometry.bytes_per_block
    assert (found.dtype, found.kv_dtype) == ("bfloat16", "bfloat16")
    assert packed - room == pytest.approx(
        2 * model.num_parameters - weight_bytes(model, "bfloat16"), rel=0.01
    )
    with pytest.raises(ConfigError, match="does not support an fp8 KV cache"):
        resolve(EngineConfig(kv_cache_dtype="fp8"), model, npu)
    with pytest.raises(ConfigError, match=r"910B has 63.00 GiB free .* Weights and activations take"):
        resolve(EngineConfig(), make_config(**SHAPES["120b"]), npu)


@pytest.mark.parametrize(
    ("line", "code", "words"),
    [
        (
            "gpt-oss-20b --gpu ascend-910b",
            0,
            ("weights   38.96 GiB (bfloat16)", "never run on an Ascend NPU"),
        ),
        ("gpt-oss-120b --gpu ascend-910b", 1, ("the weights exceed the free memory by 154.",)),
        ("gpt-oss-120b --gpu 910c -tp 8", 0, ("weights   29.03 GiB", "8 ranks, each: Ascend-910C")),
        ("gpt-oss-120b --gpu 8x910b", 0, ("--tensor-parallel-size 8", "never run on an Ascend NPU")),
    ],
)
def test_fit_knows_the_decoded_weights(
    line: str, code: int, words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["fit", *line.split()]) == code
    shown = capsys.readouterr().out
    for word in words:
        assert word in shown
