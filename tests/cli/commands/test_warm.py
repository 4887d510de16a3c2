"""``chorale warm``: compiles for a GPU that is not installed, and refuses contradicting options."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from chorale.cli.main import main
from chorale.config.options.settings import merge
from chorale.machine.gpus import MODELS
from chorale.machine.hardware import Hardware
from chorale.model.checkpoint import Checkpoint
from chorale.model.config import ModelConfig
from chorale.model.demo import ensure_demo
from chorale.model.gpt_oss import GptOss
from chorale.model.weights import Target, load_weights, weight_shapes
from chorale.runtime.sizing.resolve import resolve
from chorale.runtime.warmup.cache_key import cache_key

TINY = "--enforce-eager --max-num-seqs 1 --max-num-batched-tokens 16 --max-model-len 16 --block-size 16"


def warm(line: str, cache: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "chorale", "warm", *line.split()]
    settings = os.environ | {"TRITON_CACHE_DIR": str(cache), "TRITON_DEFAULT_FP_FUSION": "1"}
    settings |= {"TRITON_INTERPRET": "0"}
    return subprocess.run(command, env=settings, capture_output=True, text=True, timeout=500)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_kernels_are_compiled_once_and_then_found(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    done = warm(f"demo --gpu h200 {TINY}", tmp_path)
    assert done.returncode == 0, done.stderr
    assert "demo on H200 (sm_90, 132 multiprocessors)" in done.stdout
    assert str(tmp_path) in done.stdout
    kernels = [path for path in tmp_path.rglob("*.json") if '"arch": 90' in path.read_text()]
    assert len(kernels) > 20
    assert f"{len(kernels)} kernels compiled in" in done.stdout
    done = warm(f"demo --gpu h200 {TINY} --seed 5 --no-enable-prefix-caching", tmp_path)
    assert done.stdout.endswith(f"all kernels are in {tmp_path} already\n"), done.stdout + done.stderr
    kernels[0].with_name(f"__grp__{kernels[0].name}").unlink()
    done = warm(f"demo --gpu h200 {TINY}", tmp_path)
    assert f"{len(kernels)} kernels compiled in" in done.stdout, done.stderr


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("line", "shown"),
    [
        pytest.param("demo --gpu mi300x", "MI300X (gfx942, 304 multiprocessors)", marks=pytest.mark.slow),
        pytest.param(
            "demo --gpu mi355x -tp 2", "MI355X (gfx950, 256 multiprocessors)", marks=pytest.mark.slow
        ),
        pytest.param("demo --gpu r9700", "R9700 (gfx1201, 32 multiprocessors)", marks=pytest.mark.slow),
    ],
)
def test_every_kernel_that_an_amd_gpu_would_launch_compiles(line: str, shown: str, tmp_path: Path) -> None:
    """The kernels are recorded from real steps; PTX or a Hopper kernel would not compile."""
    pytest.importorskip("triton")
    done = warm(f"{line} {TINY}", tmp_path)
    assert done.returncode == 0, done.stderr
    assert shown in done.stdout
    assert " kernels compiled in" in done.stdout
    kernels = [
        json.loads(path.read_text()) for path in tmp_path.rglob("*.json") if "__grp__" not in path.name
    ]
    targets = {
        (each["target"]["backend"], each["target"]["warp_size"]) for each in kernels if "target" in each
    }
    assert targets == {("hip", 32 if "r9700" in line else 64)}
    assert not list(tmp_path.rglob("*.ptx"))


def test_a_cache_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    (tmp_path / "file").write_text("")
    done = warm(f"demo --gpu h200 {TINY}", tmp_path / "file")
    assert done.returncode == 1
    assert f"chorale: error: {tmp_path / 'file'} cannot be written" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("line", "code", "words"),
    [
        ("demo --device cpu", 0, "nothing to compile: --device cpu runs without kernels"),
        ("gpt-oss-20b --ops reference --gpu h200", 0, "nothing to compile: --ops reference"),
        ("gpt-oss-20b --gpu ascend-910b", 0, "nothing to compile: Ascend-910B runs plain torch ops"),
        ("gpt-oss-20b --gpu h200 --device cpu", 2, "cannot be combined"),
        ("gpt-oss-20b --gpu h100 h200", 2, "one GPU at a time"),
        ("gpt-oss-20b --gpu h10", 2, "did you mean h100"),
        ("gpt-oss-20b --gpu h200 --no-precompile-kernels", 2, "does not use precompiled kernels"),
        ("gpt-oss-20b --gpu h200 --max-modle-len 5", 2, "did you mean --max-model-len"),
        ("gpt-oss-7b --gpu h200", 2, "neither a folder"),
        ("gpt-oss-120b --gpu 4090", 2, "KV blocks"),
    ],
)
def test_nothing_is_compiled(line: str, code: int, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("triton")
    assert main(["warm", *line.split()]) == code
    shown = capsys.readouterr()
    assert words in shown.out + shown.err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_one_must_be_named(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("triton")
    assert main(["warm", "gpt-oss-20b"]) == 2
    assert "--gpu NAME compiles for a GPU that is not here" in capsys.readouterr().err
    assert main(["warm", "demo"]) == 0
    assert "the demo model runs on the CPU" in capsys.readouterr().out


def test_every_gpu_of_the_table_has_an_architecture() -> None:
    for model in MODELS:
        assert model.architecture.startswith(("sm_", "gfx", "ascend"))
        assert model.multiprocessors > 30 or model.architecture.startswith("ascend")


def test_the_server_computes_the_cache_key_of_warm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights that are read, each into separate memory as on a GPU, give the same key as their shapes."""
    pytest.importorskip("triton")
    from chorale.kernels.triton.ops import TRITON_OPS

    read = Checkpoint.read
    monkeypatch.setattr(Checkpoint, "read", lambda *arguments: read(*arguments).clone())
    folder = ensure_demo()
    config = ModelConfig.load(folder)
    engine = merge(["demo", *TINY.split()], {}).engine
    hardware = Hardware("cuda", "H200", 140 * 2**30, 139 * 2**30)
    resolved = resolve(engine, config, hardware, can_overlap=True, can_capture=True)
    target = Target(config, TRITON_OPS, torch.bfloat16)
    real, shapes = load_weights(folder, target), weight_shapes(target, 2)
    assert cache_key(GptOss(config, real, TRITON_OPS, 16), resolved) == cache_key(
        GptOss(config, shapes, TRITON_OPS, 16), resolved
    )
    other = dataclasses.replace(resolved, kv_dtype="fp8_e4m3")
    assert cache_key(GptOss(config, shapes, TRITON_OPS, 16), other) != cache_key(
        GptOss(config, shapes, TRITON_OPS, 16), resolved
    )


@pytest.mark.parametrize(
    ("line", "environment"), [("--no-precompile-kernels", {}), ("", {"CHORALE_PRECOMPILE_KERNELS": "false"})]
)
def test_precompilation_can_be_switched_off(line: str, environment: dict[str, str]) -> None:
    assert merge(["demo"], {}).engine.precompile_kernels
    assert not merge(["demo", *line.split()], environment).engine.precompile_kernels
