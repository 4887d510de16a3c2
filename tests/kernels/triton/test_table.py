"""The table of measured shapes: how it is found, written, read and used instead of ``tuning.py``'s own."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from chorale.cli.main import main
from chorale.errors import ConfigError
from chorale.kernels.triton import table, table_file, tuning
from chorale.kernels.triton.table_file import Choice
from chorale.kernels.triton.tuning import GemvConfig, SkinnyConfig, Tile
from tests.kernels.triton.test_interpreter import SECONDS, run

SHAPE, DECODE = GemvConfig(2, 2, 4, 9, 1, 1), Tile(0, 1, 32, 4, 2)
CHOICES = [
    Choice("gemv_down", 16, 32, SHAPE, 90.0, 100.0, 9),
    Choice("gemv_down", 8, 32, None, 50.0, 50.0, 9),
    Choice("skinny_qkv", 16, 0, SkinnyConfig(4, 8, 1, 3, 2), 1.0, 2.0, 3),
    Choice("decode", 0, 0, DECODE, 1.0, 2.0, 7),
]


@pytest.fixture
def file(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "table.json"
    table_file.write(path, CHOICES, {"architecture": "sm_100"})
    yield path
    table.use(table.EMPTY)


def test_what_was_measured_is_used(file: Path) -> None:
    plain = tuning.gemv_down(12, 12 * 4 / 32)
    table_file.install(str(file), "sm_100")
    assert tuning.gemv_down(12, 12 * 4 / 32) == tuning.gemv_down(16, 2) == SHAPE != plain
    assert tuning.gemv_down(8, 1) == GemvConfig(2, 1, 2, 3, 3, 1), "the present shape was the fastest"
    assert tuning.gemv_down(12, 12 * 4 / 128) == plain, "of 128 experts nothing was measured"
    assert tuning.gemv_down(32, 4) == GemvConfig(1, 1, 2, 9, 1, 1), "beyond what was measured"
    assert tuning.gemv_gate_up(8, 1) == GemvConfig(1, 1, 4, 9, 1, 1)
    assert tuning.skinny_qkv(12) == SkinnyConfig(4, 8, 1, 3, 2)
    assert tuning.skinny_output(2) == SkinnyConfig(2, 8, 2, 3, 2)
    assert tuning.arch_tuning("sm_100", 148) == replace(tuning.ARCH_TUNINGS["sm_100"], decode=DECODE)
    assert len(table.in_use().digest) == 64


def test_the_choices_of_a_file_are_those_that_were_written(file: Path) -> None:
    assert table_file.read(file, "sm_100") == CHOICES


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"architecture": "sm_90"}, "was measured on sm_90; here is sm_100"),
        ({"format": 2}, "has format 2; this release reads 1"),
        ({"shapes": [{"name": "decode"}]}, "not a table of chorale bench tune"),
        ({"shapes": [{"name": "cats", "shape": {}}]}, "not a table of chorale bench tune"),
    ],
)
def test_files_that_cannot_be_used(change: dict[str, object], words: str, file: Path) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(ConfigError, match=words):
        table_file.install(str(file), "sm_100")
    assert table.in_use() == table.EMPTY


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        table_file.install(str(tmp_path / "none"), "sm_100")


def test_a_server_without_kernels_refuses_a_table(file: Path) -> None:
    import torch

    from chorale.config import EngineConfig
    from chorale.kernels.reference.ops import REFERENCE_OPS
    from chorale.serve.engine.assemble import use_kernel_tuning

    with pytest.raises(ConfigError, match="reference ops have no kernels to tune"):
        use_kernel_tuning(EngineConfig(kernel_tuning=str(file)), REFERENCE_OPS, torch.device("cpu"))


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_refused_options(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = ["--out", str(tmp_path / "t.json")]
    for options, words in (
        (["--out", str(tmp_path / "no" / "t")], "cannot be written to"),
        ([*out, "--seconds", "0"], "--seconds must be above 0"),
        (out, "chorale bench tune needs a GPU"),
    ):
        assert main(["bench", "tune", *options]) == 2
        assert words in capsys.readouterr().err


BENCH = """
import sys
from chorale.bench import tune
from chorale.cli.main import main
real = tune._Tuner._seconds
# As fast as its depth is small, so that the choice does not depend on this machine.
def seconds(self, case, tokens):
    real(self, case, tokens)
    return float(tune.tuning_of(tune.torch.device("cpu")).decode.depth)
check = tune._Tuner._check
def wrong(self, case, tokens):
    if tune.tuning_of(tune.torch.device("cpu")).decode.depth == 32:
        raise ArithmeticError("relative error 1")
    check(self, case, tokens)
tune._Tuner._seconds, tune._Tuner._check = seconds, wrong
from chorale.kernels.triton.tuning import Tile
shapes = tuple(Tile(0, 1, depth, 2, 2) for depth in (32, 48, 16, 128) if depth != 48)
tune.TUNABLES = (tune.Tunable("decode", "full", (2,), shapes), tune.TUNABLES[0])
sys.exit(main(["bench", "tune", "--model", "tiny", "--out", sys.argv[1], "--seconds", sys.argv[2]]))
"""
READ = """
import sys, torch
from chorale.config import EngineConfig
from chorale.kernels.triton.launch import tuning_of
from chorale.kernels.triton.ops import TRITON_OPS
from chorale.serve.engine.assemble import use_kernel_tuning
use_kernel_tuning(EngineConfig(kernel_tuning=sys.argv[1]), TRITON_OPS, torch.device("cpu"))
assert tuning_of(torch.device("cpu")).decode.depth == 16
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.slow
@pytest.mark.timeout(SECONDS)
def test_the_bench_picks_the_fastest_right_shape_and_the_engine_reads_it(tmp_path: Path) -> None:
    """Through Triton's interpreter, with real results and given times."""
    out = str(tmp_path / "table.json")
    run(["-c", BENCH, out, "300"], TRITON_INTERPRET="1")
    body = json.loads(Path(out).read_text())
    [found] = body["shapes"]
    assert (found["name"], found["shape"]["depth"], found["tried"], body["unfinished"]) == (
        "decode",
        16,
        2,
        [],
    )
    run(["-c", READ, out], TRITON_INTERPRET="1")


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.timeout(SECONDS)
def test_what_is_not_reached_in_time_is_named(tmp_path: Path) -> None:
    out = str(tmp_path / "table.json")
    run(["-c", BENCH, out, "0.001"], TRITON_INTERPRET="1")
    body = json.loads(Path(out).read_text())
    assert (body["shapes"], body["unfinished"]) == ([], ["decode at 2"])
