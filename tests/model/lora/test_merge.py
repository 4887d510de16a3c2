"""``chorale merge``: the written checkpoint computes what the model with the adapter computes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from chorale.cli.commands.models.merge import run
from chorale.errors import ConfigError
from chorale.model.checkpoint import Checkpoint
from chorale.model.config import ModelConfig
from chorale.model.config_writer import make_config
from chorale.model.layouts import Layout
from chorale.model.lora.read import read_adapter
from chorale.testing.checkpoint_writer import write_random_checkpoint
from tests.support.device.lora import write_adapter
from tests.support.device.model import SMALL, largest_difference, load_model, prompt
from tests.support.device.paged import PagedRunner

CONFIG = make_config(**{**SMALL, "layers": 2})


def difference(base: Path, adapter: Path, merged: Path) -> float:
    own = read_adapter(adapter, CONFIG).map(torch.Tensor.float)
    expected = PagedRunner(load_model(base)).run(prompt(60), adapter=own)
    return largest_difference(PagedRunner(load_model(merged)).run(prompt(60)), expected)


@pytest.mark.parametrize(
    ("form", "source", "experts", "layout", "bound"),
    [
        ("attention", "published", "bf16", "published", 0.2),
        ("bias", "reference", "bf16", "published", 0.2),
        ("head", "dense", "bf16", "dense", 0.2),
        ("router", "published", "mxfp4", "published", 0.2),
        ("tinker", "published", "bf16", "dense", 0.2),
        ("unsloth", "dense", "bf16", "dense", 0.2),
        ("parameters", "reference", "mxfp4", "published", 2.0),
    ],
)
def test_merged_equals_adapted(
    tmp_path: Path, form: str, source: Layout, experts: str, layout: str, bound: float,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Up to bfloat16 of the sums, which moves log-probabilities by 0.05 here, and the rounding to MXFP4."""
    base = write_random_checkpoint(tmp_path / "base", CONFIG, layout=source, seed=1)
    write_adapter(tmp_path / "adapter", CONFIG, form)
    out = tmp_path / "out"
    assert run([str(base), str(tmp_path / "adapter"), str(out), "--experts", experts]) == 0
    checkpoint = Checkpoint(out, ModelConfig.load(out))
    assert checkpoint.layout == layout
    assert ("quantization_config" in json.loads((out / "config.json").read_text())) is (layout == "published")
    assert difference(base, tmp_path / "adapter", out) < bound
    printed = capsys.readouterr().out
    assert ("rounding to MXFP4" in printed) is (form == "parameters")
    if layout == source == "published":
        kept = Checkpoint(base, CONFIG)
        for role in ("gate_up.blocks", "down.scales"):
            assert torch.equal(checkpoint.read(1, role), kept.read(1, role)), "the experts are untouched"


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
