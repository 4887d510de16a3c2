"""The default model: expanded once, atomically, its hash checked, and labelled for what it is."""

from __future__ import annotations

import hashlib
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from chorale.errors import CheckpointError, ConfigError
from chorale.model import demo
from chorale.model.checkpoint import Checkpoint
from chorale.model.config import ModelConfig
from chorale.model.demo import (
    ARCHIVE,
    SHA256,
    archive,
    default_cache_dir,
    ensure_demo,
    export_demo,
)  # fmt: skip
from chorale.model.demo.archive import SAMPLING
from chorale.model.demo.features import feature_parts
from tests.support.device.demo_features import features_once


@dataclass(frozen=True)
class Expansion:
    """The first use of a cache folder: what it reported, and the processor time that it took."""

    reports: list[tuple[str, float, str]]
    seconds: float


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module", autouse=True)
def first(cache: Path) -> Iterator[Expansion]:
    reports: list[tuple[str, float, str]] = []

    def refuse(*_: object) -> None:
        raise AssertionError("the demo is in the package: nothing is downloaded")

    with features_once(archive):
        with pytest.MonkeyPatch.context() as patch:
            for name in ("getaddrinfo", "gethostbyname", "create_connection"):
                patch.setattr(socket, name, refuse)
            started = time.process_time()
            ensure_demo(lambda *report: reports.append(report), cache_dir=cache)
            seconds = time.process_time() - started
        yield Expansion(reports, seconds)


def test_written_once(cache: Path, first: Expansion) -> None:
    assert first.seconds < 20  # about 4 s, of which two cores share half
    (folder,) = cache.iterdir()  # nothing half-written beside it
    stamp = (folder / "config.json").stat().st_mtime_ns
    assert ensure_demo(lambda *report: first.reports.append(report), cache_dir=cache) == folder
    assert (folder / "config.json").stat().st_mtime_ns == stamp
    assert [path.name for path in cache.iterdir()] == [folder.name]
    assert len(first.reports) == 1


def test_an_ordinary_checkpoint(cache: Path) -> None:
    folder = ensure_demo(cache_dir=cache)
    config = ModelConfig.load(folder)
    assert config.vocab_size == 201088
    assert config.sliding_window == 128
    assert set(config.layer_types) == {"sliding_attention", "full_attention"}
    assert config.eos_token_ids == (200002, 199999, 200012)
    checkpoint = Checkpoint(folder, config)
    assert checkpoint.layout == "published"
    embedding = checkpoint.read(None, "embedding")
    assert embedding.shape == (201088, config.hidden_size)
    # Every ordinary token has a row of its own. (Two thousand of them are enough to notice a lost feature.)
    rows = embedding[:200000:100].float()
    assert len({tuple(row.tolist()) for row in rows}) == len(rows)


def test_features_are_those_on_which_the_archive_was_trained() -> None:
    parts = feature_parts([b" weather", b"Oslo's", b"17", "größe".encode(), b"\n\n"])
    digest = hashlib.sha256()
    for values in (parts.of_core, parts.own, parts.of_piece):
        digest.update(np.rint(values * 10_000).astype("<i4").tobytes())
    assert digest.hexdigest()[:16] == "cb72f894beda518d"


def test_a_request_without_a_limit_has_one() -> None:
    """The demo does not always stop by itself."""
    assert SAMPLING["max_new_tokens"] == 512


def test_small_enough_for_the_wheel() -> None:
    assert ARCHIVE.stat().st_size < 12e6


def test_a_crash_leaves_no_half_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The tables take seconds, and do not get as far as the disk.
    monkeypatch.setattr(archive, "feature_parts", lambda tokens: None)
    monkeypatch.setattr(archive, "tables", lambda parts, tensors: [torch.zeros(1), torch.zeros(1)])
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, hard))
    try:
        with pytest.raises(ConfigError, match=r"demo-.*File too large.*XDG_CACHE_HOME"):
            ensure_demo(cache_dir=tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.iterdir()) == []


def test_a_cache_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"file/chorale/demo-.*XDG_CACHE_HOME"):
        ensure_demo(cache_dir=tmp_path / "file" / "chorale")


def test_a_damaged_archive_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    damaged = tmp_path / "demo.safetensors"
    content = bytearray(ARCHIVE.read_bytes())
    content[-1] ^= 1
    damaged.write_bytes(content)
    monkeypatch.setattr(demo, "ARCHIVE", damaged)
    with pytest.raises(CheckpointError, match=SHA256):
        ensure_demo(cache_dir=tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


@pytest.mark.slow
def test_two_processes_may_race(tmp_path: Path) -> None:
    code = "import sys, pathlib, chorale.model.demo as d; d.ensure_demo(cache_dir=pathlib.Path(sys.argv[1]))"
    racers = [subprocess.Popen([sys.executable, "-c", code, str(tmp_path)]) for _ in range(2)]
    assert [racer.wait(timeout=120) for racer in racers] == [0, 0]
    (folder,) = tmp_path.iterdir()
    assert ModelConfig.load(folder).num_hidden_layers == 6


def test_export(tmp_path: Path, cache: Path) -> None:
    target = export_demo(tmp_path / "new" / "demo")
    expanded = ensure_demo(cache_dir=cache)
    names = sorted(path.name for path in expanded.iterdir())
    assert names == ["config.json", "generation_config.json", "model.safetensors"]
    for name in names:
        assert (target / name).read_bytes() == (expanded / name).read_bytes()
    assert target.stat().st_mode & 0o777 == 0o755
    with pytest.raises(FileExistsError):
        export_demo(target)


def test_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache_dir() == tmp_path / "chorale"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/someone")
    assert default_cache_dir() == Path("/home/someone/.cache/chorale")
