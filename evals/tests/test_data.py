"""Rows of data sets: from folders, from the hub, from the web, and what is said when they cannot be had."""

from __future__ import annotations

import csv
import gzip
import hashlib
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import httpx2
import pytest
from chorale_evals import data, tables
from chorale_evals.data import HubFile, WebFile, data_folder, digest, load_file, load_rows, unique
from chorale_evals.tasks import make_task

from chorale.errors import ConfigError

ROWS = [{"question": "1 + 1?\u2028", "answer": "2"}, {"question": 'say "a, b"\nor c', "answer": "ü"}]
HUB = HubFile("owner/set", "main/test-00000.parquet", "test", "0" * 40)
WEB = WebFile("https://example.invalid/data/rows.jsonl", "rows")


def _lines(rows: list[Any]) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def _csv(path: Path) -> None:
    with path.open("w", newline="", encoding="utf-8-sig") as file:
        writer = csv.DictWriter(file, ROWS[0])
        writer.writeheader()
        writer.writerows(ROWS)


def test_a_folder_may_hold_any_form(tmp_path: Path) -> None:
    for name in ("test.jsonl", "test.json", "test.csv", "test.jsonl.gz"):
        path = tmp_path / name
        if name.endswith(".gz"):
            path.write_bytes(gzip.compress(_lines(ROWS)))
        elif name.endswith(".csv"):
            _csv(path)
        else:
            path.write_bytes(_lines(ROWS) if name == "test.jsonl" else json.dumps(ROWS).encode())
        assert load_rows(HUB, tmp_path, columns=("question", "answer")) == ROWS
        path.unlink()
    with pytest.raises(
        ConfigError, match=r"none of these files: main/test-00000.parquet, test-00000.parquet"
    ):
        load_rows(HUB, tmp_path)


def test_the_path_of_the_repository_takes_precedence(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "a.jsonl").write_bytes(_lines(ROWS[:1]))
    (tmp_path / "test.jsonl").write_bytes(_lines(ROWS))
    assert load_rows(HubFile("o/s", "sub/a.jsonl", "test"), tmp_path) == ROWS[:1]


def test_parquet_is_read_by_pyarrow(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = [
        {"question": "q", "choices": ["a", "b"], "answer": 1},
        {"question": "r", "choices": [], "answer": 0},
    ]
    (tmp_path / "main").mkdir()
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / HUB.path)
    assert load_rows(HUB, tmp_path) == rows
    (tmp_path / HUB.path).write_bytes(b"PAR1 not really")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_rows(HUB, tmp_path)


def test_parquet_through_a_stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is read and refused, where pyarrow is not installed."""

    class File:
        metadata = SimpleNamespace(num_rows=2)

        def __init__(self, path: Path) -> None:
            if path.read_bytes() != b"PAR1":
                raise ArrowError("bad file")

        def __enter__(self) -> File:
            return self

        def __exit__(self, *_: object) -> None: ...

        def read(self) -> Any:
            return SimpleNamespace(to_pylist=lambda: ROWS)

    class ArrowError(Exception):
        pass

    stand_in: Any = ModuleType("pyarrow")
    stand_in.parquet, stand_in.ArrowException = SimpleNamespace(ParquetFile=File), ArrowError
    monkeypatch.setitem(sys.modules, "pyarrow", stand_in)
    path = tmp_path / "test.parquet"
    path.write_bytes(b"PAR1")
    assert load_rows(HUB, tmp_path) == ROWS
    File.metadata.num_rows = tables.MAX_ROWS + 1
    with pytest.raises(ConfigError, match="at most 200,000 are read"):
        load_rows(HUB, tmp_path)
    path.write_bytes(b"other")
    with pytest.raises(ConfigError, match="cannot be read: bad file"):
        load_rows(HUB, tmp_path)


def test_parquet_without_pyarrow_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "test-00000.parquet").write_bytes(b"PAR1")
    with pytest.raises(ConfigError, match="pip install pyarrow"):
        load_rows(HUB, tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("test.jsonl", b'{"a": 1}\n[1]\n', "row 2 is not an object"),
        ("test.jsonl", b'{"a": 1}\n{"a": \n', "cannot be read"),
        ("test.jsonl", b"\n", "has no rows"),
        ("test.jsonl", b"\xff\xfe", "cannot be read"),
        ("test.csv", b"question,answer\n1,2,3\n", "row 1 has more fields"),
        ("test.csv", b"question\n1\n", "row 1 has no column 'answer'"),
        ("test.jsonl", b'{"question": "q", "answer": null}', "row 1 has no column 'answer'"),
        ("test.jsonl.gz", b"not gzip", "cannot be read"),
        ("test.jsonl.gz", gzip.compress(b'{"question": 1}', mtime=0)[:-9], "cannot be read"),
    ],
)
def test_a_bad_file_is_named(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=message) as caught:
        load_rows(HUB, tmp_path, columns=("question", "answer"))
    assert name in str(caught.value)


def test_sizes_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "test.jsonl").write_bytes(_lines(ROWS))
    monkeypatch.setattr(tables, "MAX_ROWS", 1)
    with pytest.raises(ConfigError, match="2 rows; at most 1"):
        load_rows(HUB, tmp_path)
    monkeypatch.setattr(data, "MAX_BYTES", 10)
    with pytest.raises(ConfigError, match="at most 10 are read"):
        load_rows(HUB, tmp_path)
    monkeypatch.setattr(tables, "_MAX_BYTES", 10)
    (tmp_path / "test.jsonl").unlink()
    (tmp_path / "test.jsonl.gz").write_bytes(gzip.compress(b"[" + b" " * 100 + b"]"))
    monkeypatch.setattr(data, "MAX_BYTES", 10_000)
    with pytest.raises(ConfigError, match="more than 10 bytes"):
        load_rows(HUB, tmp_path)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A hub that hands out ``path`` or raises ``fault``, and keeps what it was asked."""
    import huggingface_hub

    state: dict[str, Any] = {}

    def download(repository: str, path: str, **options: Any) -> str:
        state["asked"] = (repository, path, options)
        if "fault" in state:
            raise state["fault"]
        return str(state["path"])

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    return state


def test_the_hub_is_asked_for_a_pinned_revision(tmp_path: Path, hub: dict[str, Any]) -> None:
    hub["path"] = tmp_path / "x.jsonl"
    hub["path"].write_bytes(_lines(ROWS))
    assert load_rows(HUB) == ROWS
    assert hub["asked"] == ("owner/set", HUB.path, {"repo_type": "dataset", "revision": "0" * 40})


def test_another_file_than_the_published_one_is_refused(tmp_path: Path, hub: dict[str, Any]) -> None:
    hub["path"] = tmp_path / "x.jsonl"
    hub["path"].write_bytes(_lines(ROWS))
    right = hashlib.sha256(_lines(ROWS)).hexdigest()
    assert load_rows(HubFile("o/s", "x.jsonl", "x", "main", right)) == ROWS
    with pytest.raises(ConfigError, match="not the published file: its SHA-256 is"):
        load_rows(HubFile("o/s", "x.jsonl", "x", "main", "0" * 64))


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("GatedRepoError", "accept its terms at https://huggingface.co/datasets/owner/set and set HF_TOKEN"),
        ("RevisionNotFoundError", "the hub has no revision 0000"),
        ("RepositoryNotFoundError", "not on the hub"),
        ("LocalEntryNotFoundError", "the hub cannot be reached"),
    ],
)
def test_errors_of_the_hub_say_what_to_do(hub: dict[str, Any], kind: str, message: str) -> None:
    from huggingface_hub import errors

    cls = getattr(errors, kind)
    fault = cls.__new__(cls)
    Exception.__init__(fault, "many\nlines")
    hub["fault"] = fault
    with pytest.raises(ConfigError, match=message) as caught:
        load_rows(HUB)
    assert "use --data DIR" in str(caught.value)


def test_the_web_is_next_and_cached(
    tmp_path: Path, hub: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    served: list[str] = []

    def answer(request: httpx2.Request) -> httpx2.Response:
        served.append(str(request.url))
        return httpx2.Response(200, content=_lines(ROWS))

    _web(monkeypatch, tmp_path, answer)
    hub["fault"] = OSError("down")
    assert load_rows([HUB, WEB]) == load_rows([HUB, WEB]) == ROWS
    assert served == [WEB.url]
    assert load_file(WEB).name.endswith("rows.jsonl")


def test_a_source_that_cannot_be_read_here_gives_way(
    tmp_path: Path, hub: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """MMLU and GSM8K work without pyarrow: their second source is no Parquet file."""
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    hub["path"] = tmp_path / "x.parquet"
    hub["path"].write_bytes(b"PAR1")
    _web(monkeypatch, tmp_path, lambda _: httpx2.Response(200, content=_lines(ROWS)))
    assert load_rows([HUB, WEB]) == ROWS


def test_a_download_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _web(monkeypatch, tmp_path, lambda _: httpx2.Response(404))
    with pytest.raises(ConfigError, match=r"rows\.jsonl cannot be read"):
        load_rows(WEB)
    monkeypatch.setattr(data, "MAX_BYTES", 5)
    _web(monkeypatch, tmp_path, lambda _: httpx2.Response(200, content=b"x" * 6))
    with pytest.raises(ConfigError, match="at most 5 are read"):
        load_rows(WEB)
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
    assert (sample / "test.jsonl").is_file()
    with pytest.raises(ConfigError, match="no packaged sample of nothing"):
        data_folder("nothing", "sample")
    with pytest.raises(ConfigError, match="no such folder"):
        data_folder("mmlu", tmp_path / "missing")


def test_ids_and_digests() -> None:
    assert unique(["a", "b", "a", "a"]) == ["a", "b", "a-2", "a-3"]
    assert digest(ROWS) != digest(ROWS[::-1])
    assert digest(ROWS) == digest([dict(reversed(row.items())) for row in ROWS])


@pytest.mark.parametrize("name", ["gpqa_diamond", "aime25", "mmlu"])
def test_ids_of_samples_depend_on_the_data_only(name: str) -> None:
    first, second = (make_task(name, data=Path("sample"), seed=seed) for seed in (0, 1))
    ids = [one.id for one in first.samples()]
    assert ids == [one.id for one in second.samples()]
    assert len(set(ids)) == len(ids) >= 6
    assert {one.id for one in make_task(name, data=Path("sample"), limit=2).samples()} < set(ids)
    assert isinstance(json.dumps([one.question for one in first.samples()]), str)
