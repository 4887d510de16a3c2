"""Rows of data sets: from folders, from the web, and the errors if they cannot be read."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import httpx2
import pytest
from chorale_evals import data
from chorale_evals.data import Source, data_folder, digest, load_rows, unique
from chorale_evals.tasks import make_task

from chorale.errors import ConfigError

ROWS = [{"question": "1 + 1?\u2028", "answer": "2"}, {"question": 'say "a, b"\nor c', "answer": "ü"}]
SOURCE = Source("https://example.invalid/data/rows.jsonl")
COLUMNS = ("question", "answer")


def _lines(rows: list[Any]) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def test_a_data_folder_is_searched_for_the_name_of_the_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"rows\.jsonl"):
        load_rows(SOURCE, tmp_path, COLUMNS)
    (tmp_path / "rows.jsonl").write_bytes(_lines(ROWS))
    assert load_rows(SOURCE, tmp_path, COLUMNS) == ROWS


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("rows.jsonl", b'{"a": 1}\n[1]\n', "row 1 has no column"),
        ("rows.jsonl", b"[1]\n", "row 1 is not an object"),
        ("rows.jsonl", b'{"a": \n', "cannot be read"),
        ("rows.jsonl", b"\n", "has no rows"),
        ("rows.jsonl", b"\xff\xfe", "cannot be read"),
        ("rows.csv", b"question,answer\n1,2,3\n", "row 1 is not an object"),
        ("rows.csv", b"question\n1\n", "row 1 has no column 'answer'"),
        ("rows.jsonl", b'{"question": "q", "answer": null}', "row 1 has no column 'answer'"),
    ],
)
def test_the_error_names_a_bad_file(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=message) as caught:
        load_rows(Source(f"https://example.invalid/{name}"), tmp_path, COLUMNS)
    assert name in str(caught.value)


def test_a_file_above_the_size_limit_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rows.jsonl").write_bytes(_lines(ROWS))
    monkeypatch.setattr(data, "MAX_BYTES", 10)
    with pytest.raises(ConfigError, match="at most 10 are read"):
        load_rows(SOURCE, tmp_path, COLUMNS)


def test_a_download_is_kept_and_compared_with_its_hash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served: list[str] = []

    def answer(request: httpx2.Request) -> httpx2.Response:
        served.append(str(request.url))
        return httpx2.Response(200, content=_lines(ROWS))

    _web(monkeypatch, tmp_path, answer)
    right = Source(SOURCE.url, hashlib.sha256(_lines(ROWS)).hexdigest())
    assert load_rows(right, None, COLUMNS) == load_rows(SOURCE, None, COLUMNS) == ROWS
    assert served == [SOURCE.url]
    with pytest.raises(ConfigError, match="not the published file: its SHA-256 is"):
        load_rows(Source(SOURCE.url, "0" * 64), None, COLUMNS)


def test_a_download_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _web(monkeypatch, tmp_path, lambda _: httpx2.Response(404))
    with pytest.raises(ConfigError, match=r"rows\.jsonl"):
        load_rows(SOURCE, None, COLUMNS)
    monkeypatch.setattr(data, "MAX_BYTES", 5)
    _web(monkeypatch, tmp_path, lambda _: httpx2.Response(200, content=b"x" * 6))
    with pytest.raises(ConfigError, match="at most 5 are read"):
        load_rows(SOURCE, None, COLUMNS)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def _web(monkeypatch: pytest.MonkeyPatch, cache: Path, answer: Any) -> None:
    client = httpx2.Client(transport=httpx2.MockTransport(answer))
    monkeypatch.setattr(httpx2, "stream", client.stream)
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))


def test_data_names_a_folder_or_the_sample(tmp_path: Path) -> None:
    assert data_folder("mmlu", None) is None
    assert data_folder("mmlu", tmp_path) == tmp_path
    (tmp_path / "mmlu").mkdir()
    assert data_folder("mmlu", tmp_path) == tmp_path / "mmlu"
    sample = data_folder("mmlu", "sample")
    assert sample is not None
    assert (sample / "mmlu.csv").is_file()
    with pytest.raises(ConfigError, match="no such folder"):
        data_folder("mmlu", tmp_path / "missing")


def test_ids_are_unique_and_digests_depend_on_the_order_of_rows() -> None:
    assert unique(["a", "b", "a", "a"]) == ["a", "b", "a-2", "a-3"]
    assert digest(ROWS) != digest(ROWS[::-1])
    assert digest(ROWS) == digest([dict(reversed(row.items())) for row in ROWS])


@pytest.mark.parametrize("name", ["gpqa_diamond", "aime25", "mmlu"])
def test_ids_of_samples_depend_on_the_data_only(name: str) -> None:
    first, second = (make_task(name, data=Path("sample"), seed=seed) for seed in (0, 1))
    ids = [one.id for one in first.samples]
    assert ids == [one.id for one in second.samples]
    assert len(set(ids)) == len(ids) >= 6
    assert {one.id for one in make_task(name, data=Path("sample"), limit=2).samples} < set(ids)
    assert isinstance(json.dumps([one.question for one in first.samples]), str)
