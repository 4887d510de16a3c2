"""The checks of the checkpoint's files: each planted fault is named, and a sound checkpoint is not blamed."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from chorale.measure.bench.checkpoint_writer import write_random_checkpoint
from chorale.measure.selfcheck.check import Failed, Skipped
from chorale.measure.selfcheck.device import files, logprobs
from chorale.model.config_writer import make_config
from chorale.model.demo import ensure_demo
from tests.support.device.faults import FAULTS, Array, Fault, plant
from tests.support.runtime import SIZES
from tests.support.selfcheck import machine_of

# Fault planted in a copy of the demo -> the checks that detect it.
SEEN = {
    "expert_scale": (files.check_checksums, logprobs.check_answers),
    "sink_left_out": (files.check_checksums, logprobs.check_answers, files.check_values),
    "window_one_less": (files.check_shapes, logprobs.check_answers),
    "no_concentration": (files.check_shapes, logprobs.check_answers),
    "half_swapped": (files.check_checksums, logprobs.check_answers),
    "rank_half_swapped": (files.check_checksums, logprobs.check_answers),
    "bias_dropped": (files.check_checksums, logprobs.check_answers, files.check_values),
}


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random checkpoint with gpt-oss's constants."""
    sizes = SIZES | {"layers": 2, "head_dim": 64, "sliding_window": 128}
    return write_random_checkpoint(tmp_path_factory.mktemp("model") / "random", make_config(**sizes))


def test_the_demo_passes_all_file_checks() -> None:
    machine = machine_of(ensure_demo())
    for check in (files.check_shapes, files.check_checksums, files.check_values):
        assert check(machine).detail


def test_every_file_fault_has_its_checks_listed() -> None:
    assert {name for name, fault in FAULTS.items() if not fault.engine} == set(SEEN)


@pytest.mark.parametrize("fault", SEEN)
def test_a_fault_in_the_demos_files_is_detected(fault: str, tmp_path: Path) -> None:
    machine = machine_of(plant(fault, ensure_demo(), tmp_path / "faulty"))
    for check in SEEN[fault]:
        with pytest.raises(Failed):
            check(machine)


def nan(values: Array) -> None:
    values[3] = np.nan


def hole(values: Array) -> None:
    values[1] = 0


def nan_scale(values: Array) -> None:
    values[2, 0, 0] = 255


@pytest.mark.parametrize(
    ("name", "edit", "words"),
    [
        ("input_layernorm.weight", nan, "not finite"),
        ("mlp.experts.down_proj_blocks", hole, "expert 1 begins with zeros"),
        ("mlp.experts.gate_up_proj_scales", nan_scale, "1 scales are 255"),
    ],
)
def test_impossible_values_are_named(
    small: Path, tmp_path: Path, name: str, edit: Callable[[Array], None], words: str
) -> None:
    files.check_values(machine_of(small))
    fault = Fault(tensors={f"model.layers.1.{name}": edit})
    with pytest.raises(Failed, match=f"{name}: {words}"):
        files.check_values(machine_of(plant(fault, small, tmp_path / "faulty")))


def test_files_without_published_hashes_skip_the_check(small: Path) -> None:
    with pytest.raises(Skipped, match="no published hashes"):
        files.check_checksums(machine_of(small))


def test_known_answers_use_the_demo_for_other_checkpoints(small: Path) -> None:
    assert "equal those of transformers" in logprobs.check_answers(machine_of(small)).detail


def as_hub_cache(source: Path, folder: Path) -> Path:
    """Copies a checkpoint to a cache of huggingface_hub: large files by sha256, small ones by git's hash."""
    snapshot, blobs = folder / "snapshots" / ("0" * 8), folder / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for file in source.iterdir():
        data = file.read_bytes()
        large = file.suffix == ".safetensors"
        digest = hashlib.sha256(data) if large else hashlib.sha1(b"blob %d\0" % len(data) + data)
        shutil.copyfile(file, blobs / digest.hexdigest())
        (snapshot / file.name).symlink_to(blobs / digest.hexdigest())
    return snapshot


def test_a_changed_file_in_the_hub_cache_is_named(small: Path, tmp_path: Path) -> None:
    snapshot = as_hub_cache(small, tmp_path / "cache")
    machine = machine_of(snapshot)
    assert "hashes of 6 files are the published ones" in files.check_checksums(machine).detail
    for name in ("config.json", "model-00002-of-00003.safetensors"):
        blob = (snapshot / name).resolve()
        before = blob.read_bytes()
        blob.write_bytes(before[:-1] + bytes([before[-1] ^ 1]))
        with pytest.raises(Failed, match=name):
            files.check_checksums(machine)
        blob.write_bytes(before)


def test_a_changed_file_in_a_download_folder_is_named(small: Path, tmp_path: Path) -> None:
    folder = tmp_path / "local"
    shutil.copytree(small, folder)
    notes = folder / ".cache" / "huggingface" / "download"
    notes.mkdir(parents=True)
    weights = folder / "model-00001-of-00003.safetensors"
    for digest, is_right in ((hashlib.sha256(weights.read_bytes()).hexdigest(), True), ("0" * 64, False)):
        (notes / f"{weights.name}.metadata").write_text(f"{'1' * 40}\n{digest}\n1700000000.0\n")
        if is_right:
            assert "5 others have none" in files.check_checksums(machine_of(folder)).detail
            continue
        with pytest.raises(Failed, match=weights.name):
            files.check_checksums(machine_of(folder))


def test_constants_that_differ_from_gpt_oss_are_named(tmp_path: Path) -> None:
    folder = write_random_checkpoint(tmp_path / "random", make_config(**(SIZES | {"layers": 2})))
    with pytest.raises(Failed, match=r"sliding_window is 32, not 128; head_dim is 16, not 64"):
        files.check_shapes(machine_of(folder))
