"""The default model: written once, atomically, and labelled for what it is."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from chorale.demo import DEMO_NOTICE, default_cache_dir, ensure_demo
from chorale.model.checkpoint import Checkpoint
from chorale.model.config import ModelConfig


def test_written_once(tmp_path: Path) -> None:
    reports: list[tuple[str, float, str]] = []
    folder = ensure_demo(lambda *report: reports.append(report), cache_dir=tmp_path)
    stamp = (folder / "config.json").stat().st_mtime_ns
    assert ensure_demo(cache_dir=tmp_path) == folder
    assert (folder / "config.json").stat().st_mtime_ns == stamp
    assert [path.name for path in tmp_path.iterdir()] == [folder.name]  # nothing half-written beside it
    assert len(reports) == 1
    config = ModelConfig.load(folder)
    assert config.vocab_size == 201088
    assert config.sliding_window == 128
    assert set(config.layer_types) == {"sliding_attention", "full_attention"}
    assert config.eos_token_ids == (200002, 199999, 200012)
    assert Checkpoint(folder, config).layout == "published"


def test_a_crash_leaves_no_half_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full_disk(*args: object, **kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("chorale.model.checkpoint_writer.write_safetensors", full_disk)
        with pytest.raises(OSError, match="No space"):
            ensure_demo(cache_dir=tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert (ensure_demo(cache_dir=tmp_path) / "config.json").exists()


def test_same_weights_everywhere(tmp_path: Path) -> None:
    """Seeded: a figure measured on one machine is about the same model on another."""
    folder = ensure_demo(cache_dir=tmp_path)
    embedding = Checkpoint(folder, ModelConfig.load(folder)).read(None, "embedding")
    assert embedding.dtype == torch.bfloat16
    # One unit of bfloat16: torch's normal draws may differ by CPU in the last bit of float32.
    assert embedding[0, :4].tolist() == pytest.approx(
        [0.66015625, -0.6171875, 1.03125, -0.1845703125], rel=2**-7
    )


def test_two_processes_may_race(tmp_path: Path) -> None:
    with ThreadPoolExecutor(2) as pool:
        folders = list(pool.map(lambda _: ensure_demo(cache_dir=tmp_path), range(2)))
    assert folders[0] == folders[1]
    assert [path.name for path in tmp_path.iterdir()] == [folders[0].name]


def test_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache_dir() == tmp_path / "chorale"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/someone")
    assert default_cache_dir() == Path("/home/someone/.cache/chorale")


def test_notice() -> None:
    assert "random weights" in DEMO_NOTICE
