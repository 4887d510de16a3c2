"""``chorale merge``: the written checkpoint holds the sums in bfloat16, and untouched experts unchanged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from chorale.cli.commands.models.merge import run
from chorale.errors import ConfigError
from chorale.kernels import mxfp4
from chorale.measure.bench.checkpoint_writer import RandomTensors, write_random_checkpoint
from chorale.model.checkpoint import Checkpoint
from chorale.model.config import ModelConfig
from chorale.model.config_writer import make_config
from chorale.model.layouts import Layout, TensorSpec, tensor_specs
from tests.support.device.lora import Draft, write_adapter
from tests.support.device.model import SMALL

CONFIG = make_config(**{**SMALL, "layers": 2})


def expected(draft: Draft, spec: TensorSpec) -> torch.Tensor:
    """Returns the merged tensor of the dense layout in float32."""
    if spec.name in draft.replaced:
        return draft.replaced[spec.name]
    whole = RandomTensors(CONFIG, 1).tensor(spec.layer, spec.role).float()
    return whole + draft.deltas.get(spec.name, torch.zeros(()))


def decoded(checkpoint: Checkpoint, spec: TensorSpec) -> torch.Tensor:
    if checkpoint.has(spec.layer, spec.role):
        return checkpoint.read(spec.layer, spec.role).float()
    name = spec.role.removesuffix(".dense")
    parts = (checkpoint.read(spec.layer, f"{name}.{kind}") for kind in ("blocks", "scales"))
    return mxfp4.dequantize(*parts, torch.float32).transpose(1, 2)


@pytest.mark.parametrize(
    ("form", "source", "experts", "layout"),
    [
        ("attention", "published", "bf16", "published"),
        ("bias", "reference", "bf16", "published"),
        ("head", "dense", "bf16", "dense"),
        ("router", "published", "mxfp4", "published"),
        ("tinker", "published", "bf16", "dense"),
        ("unsloth", "dense", "bf16", "dense"),
        ("parameters", "reference", "mxfp4", "published"),
    ],
)
def test_the_written_weights_are_the_sums(
    tmp_path: Path, form: str, source: Layout, experts: str, layout: str,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    base = write_random_checkpoint(tmp_path / "base", CONFIG, layout=source, seed=1)
    draft = write_adapter(tmp_path / "adapter", CONFIG, form)
    out = tmp_path / "out"
    assert run([str(base), str(tmp_path / "adapter"), str(out), "--experts", experts]) == 0
    checkpoint = Checkpoint(out, ModelConfig.load(out))
    assert checkpoint.layout == layout
    assert ("quantization_config" in json.loads((out / "config.json").read_text())) is (layout == "published")
    is_rounded = form == "parameters"
    assert ("rounding to MXFP4" in capsys.readouterr().out) is is_rounded
    for spec in tensor_specs(CONFIG, "dense"):
        found, wanted = decoded(checkpoint, spec), expected(draft, spec)
        if is_rounded and spec.role.endswith(".dense"):
            assert float((found - wanted).norm() / wanted.norm()) < 0.15, spec.name
        else:  # bfloat16 has 8 bits
            assert torch.allclose(found, wanted, rtol=2**-8, atol=1e-7), spec.name


def test_what_cannot_be_merged(tmp_path: Path) -> None:
    base = write_random_checkpoint(tmp_path / "base", CONFIG, layout="quark", seed=1)
    write_adapter(tmp_path / "adapter", CONFIG)
    out, adapter = str(tmp_path / "out"), str(tmp_path / "adapter")
    for line in (
        [str(base), adapter, out],
        [str(base), adapter],
        [str(base), adapter, out, "--experts", "int4"],
        [str(base), adapter, str(tmp_path)],
        [str(base), str(tmp_path / "none"), out],
    ):
        with pytest.raises(ConfigError):
            run(line)
    assert {each.name for each in tmp_path.iterdir()} == {"base", "adapter"}, "nothing is left behind"
