"""Recordings are read back unchanged, and damaged ones are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chorale_evals.parity.recording import load, save
from readings import recording

from chorale.errors import ConfigError


def test_a_recording_is_read_as_it_was_written(tmp_path: Path) -> None:
    written = recording("server", 1, 1e-3)
    save(written, tmp_path / "base.npz")
    read = load(tmp_path / "base.npz")
    assert (read.about, read.top_k) == (written.about, written.top_k)
    for one, other in zip(read.readings, written.readings, strict=True):
        assert (one.text, one.greedy, one.continuation) == (other.text, other.greedy, other.continuation)
        for name in ("alone", "greedy_scores", "again"):
            left, right = getattr(one, name), getattr(other, name)
            np.testing.assert_array_equal(left.token, right.token)
            np.testing.assert_array_equal(left.top, right.top)
            np.testing.assert_array_equal(left.top_ids, right.top_ids)
    assert [path.name for path in tmp_path.iterdir()] == ["base.npz"]


def _without_an_array(arrays: dict[str, Any]) -> None:
    del arrays["array_1"]


def _of_another_format(arrays: dict[str, Any]) -> None:
    head = arrays["head"].tobytes().replace(b"chorale-parity", b"something else")
    arrays["head"] = np.frombuffer(head, np.uint8)


def _of_objects(arrays: dict[str, Any]) -> None:
    """NumPy stores objects as pickles, which may contain code."""
    arrays["array_1"] = np.array([{}], object)


@pytest.mark.parametrize("damage", [_without_an_array, _of_another_format, _of_objects])
def test_a_damaged_recording_is_refused(tmp_path: Path, damage: Any) -> None:
    path = tmp_path / "base.npz"
    save(recording("server", 1, 1e-3), path)
    arrays = dict(np.load(path))
    damage(arrays)
    np.savez(path, **arrays)
    with pytest.raises(ConfigError, match=r"base\.npz: not a recording"):
        load(path)


def test_a_recording_above_the_size_limit_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(recording("server", 1, 1e-3), tmp_path / "base.npz")
    monkeypatch.setattr("chorale_evals.parity.recording.MOST_BYTES", 10_000)
    with pytest.raises(ConfigError, match="too large"):
        load(tmp_path / "base.npz")


@pytest.mark.parametrize("content", [b"", b"{}", b"PK\5\6" + 18 * b"\0", b"\x93NUMPY"])
def test_a_file_that_is_not_a_recording_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "base.npz"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="not a recording"):
        load(path)
