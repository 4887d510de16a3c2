"""Tasks made from files: other columns and missing parts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from chorale_evals.task import Outcome, Scored
from chorale_evals.tasks import make_task

from chorale.errors import ConfigError


def _write(path: Path, *rows: dict[str, Any]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")


def test_mmlu_reads_the_columns_of_either_source(tmp_path: Path) -> None:
    (tmp_path / "mmlu.csv").write_text("Question,A,B,C,D,Answer,Subject\n1 + 1?,1,2,3,4,B,anatomy\n", "utf-8")
    (sample,) = make_task("mmlu", data=tmp_path).samples()
    row = {"question": "1 + 1?", "subject": "anatomy", "choices": ["1", "2", "3", "4"], "answer": 1}
    _write(tmp_path / "test.jsonl", row)
    assert make_task("mmlu", data=tmp_path).samples() == [sample]
    assert (sample.target, sample.group) == ("B", "anatomy")


@pytest.mark.parametrize("change", [{"choices": ["1"]}, {"answer": 4}, {"answer": -1}, {"subject": None}])
def test_mmlu_refuses_rows_that_are_no_questions(tmp_path: Path, change: dict[str, Any]) -> None:
    row = {"question": "q", "subject": "anatomy", "choices": ["1", "2", "3", "4"], "answer": 1} | change
    _write(tmp_path / "test.jsonl", row)
    with pytest.raises(ConfigError, match="not a question with four choices"):
        make_task("mmlu", data=tmp_path)


def test_questions_that_occur_twice_have_two_ids(tmp_path: Path) -> None:
    row = {"question": "q", "subject": "anatomy", "choices": ["1", "2", "3", "4"], "answer": 1}
    _write(tmp_path / "test.jsonl", row, row)
    assert len({one.id for one in make_task("mmlu", data=tmp_path).samples()}) == 2


def test_aime_answers_must_start_with_digits(tmp_path: Path) -> None:
    for name, answer in (("aime2025-I", "70"), ("aime2025-II", "m")):
        _write(tmp_path / f"{name}.jsonl", {"question": "q", "answer": answer})
    with pytest.raises(ConfigError, match="'m' does not start with digits"):
        make_task("aime25", data=tmp_path)
    _write(tmp_path / "aime2025-II.jsonl", {"question": "r", "answer": 588})
    assert [one.target for one in make_task("aime25", data=tmp_path).samples()] == [70, 588]


def test_mmlu_breaks_down_by_category_and_subject() -> None:
    task: Any = make_task("mmlu", data=Path("sample"))
    scored = [Scored(one, 0, Outcome(float(place < 4), None)) for place, one in enumerate(task.samples())]
    rows = {row.name: (row.score, row.count) for row in task.breakdowns(scored)}
    assert {name: rows[name] for name in ("stem", "humanities", "social_sciences", "other")} == {
        "stem": (1.0, 2), "humanities": (1.0, 2), "social_sciences": (0.0, 2), "other": (0.0, 2),
    }  # fmt: skip
    assert rows["nutrition"] == (0.0, 1)
