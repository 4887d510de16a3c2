"""Recordings are read back unchanged, and damaged ones are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chorale_evals.parity.recording import load, save
from readings import recording

from chorale.errors import ConfigError


def test_a_recording_is_read_as_it_was_written(tmp_path: Path) -> None:
    written = recording("server", 1, 1e-3)
    save(written, tmp_path / "base.json")
    read = load(tmp_path / "base.json")
    assert (read.about, read.top_k) == (written.about, written.top_k)
    for one, other in zip(read.readings, written.readings, strict=True):
        assert (one.text, one.greedy, one.continuation) == (other.text, other.greedy, other.continuation)
        for name in ("alone", "greedy_scores", "again"):
            left, right = getattr(one, name), getattr(other, name)
            np.testing.assert_array_equal(left.token, right.token)
            np.testing.assert_array_equal(left.top, right.top)
            np.testing.assert_array_equal(left.top_ids, right.top_ids)
    assert [path.name for path in tmp_path.iterdir()] == ["base.json"]


def _shorter(data: dict[str, Any]) -> None:
    data["readings"][0]["alone"]["token"]["shape"] = [5]


def _huge(data: dict[str, Any]) -> None:
    data["readings"][0]["alone"]["token"]["shape"] = [2**40]


def _without_texts(data: dict[str, Any]) -> None:
    del data["readings"][0]["token_ids"]


def _of_another_format(data: dict[str, Any]) -> None:
    data["format"] = "something else"


@pytest.mark.parametrize("damage", [_shorter, _huge, _without_texts, _of_another_format])
def test_a_damaged_recording_is_refused(tmp_path: Path, damage: Any) -> None:
    path = tmp_path / "base.json"
    save(recording("server", 1, 1e-3), path)
    data = json.loads(path.read_text())
    damage(data)
    path.write_text(json.dumps(data))
    with pytest.raises(ConfigError, match=r"base\.json: not a recording"):
        load(path)


@pytest.mark.parametrize("content", ["", "[]", "{}", "\0"])
def test_a_file_that_is_not_a_recording_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "base.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match="not a recording"):
        load(path)
