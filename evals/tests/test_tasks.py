"""Tasks made from data files, invalid rows, and tasks of other tools."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from chorale_evals.tasks import ELSEWHERE, make_task

from chorale.errors import ConfigError

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "evaluation.md"


def _write(path: Path, *rows: dict[str, Any]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")


HEAD = "Question,A,B,C,D,Answer,Subject\n"


def test_a_question_of_mmlu_has_four_choices_a_letter_and_a_subject(tmp_path: Path) -> None:
    (tmp_path / "mmlu.csv").write_text(HEAD + "1 + 1?,1,2,3,4,B,anatomy\n", "utf-8")
    (sample,) = make_task("mmlu", data=tmp_path).samples
    assert sample.question == {"question": "1 + 1?", "choices": ["1", "2", "3", "4"]}
    assert (sample.target, sample.group) == ("B", "anatomy")


@pytest.mark.parametrize(
    "row", ["q,1,2,3,4,E,anatomy", "q,1,2,3,4,,anatomy", "q,1,2,3,4,B", "q,1,2,3,4,B,a,b"]
)
def test_mmlu_refuses_invalid_rows(tmp_path: Path, row: str) -> None:
    (tmp_path / "mmlu.csv").write_text(f"{HEAD}{row}\n", "utf-8")
    with pytest.raises(ConfigError):
        make_task("mmlu", data=tmp_path)


def test_questions_that_occur_twice_have_two_ids(tmp_path: Path) -> None:
    (tmp_path / "mmlu.csv").write_text(HEAD + 2 * "q,1,2,3,4,B,anatomy\n", "utf-8")
    assert len({one.id for one in make_task("mmlu", data=tmp_path).samples}) == 2


def test_aime_answers_must_start_with_digits(tmp_path: Path) -> None:
    for name, answer in (("aime2025-I", "70"), ("aime2025-II", "m")):
        _write(tmp_path / f"{name}.jsonl", {"question": "q", "answer": answer})
    with pytest.raises(ConfigError, match="'m' does not start with digits"):
        make_task("aime25", data=tmp_path)
    _write(tmp_path / "aime2025-II.jsonl", {"question": "r", "answer": 588})
    assert [one.target for one in make_task("aime25", data=tmp_path).samples] == [70, 588]


def test_mmlu_breaks_down_by_category_and_subject() -> None:
    task: Any = make_task("mmlu", data=Path("sample"))
    scores = [(one.group, float(place < 4)) for place, one in enumerate(task.samples)]
    rows = {row.name: (row.score, row.count) for row in task.breakdowns(scores)}
    assert {name: rows[name] for name in ("stem", "humanities", "social_sciences", "other")} == {
        "stem": (1.0, 2), "humanities": (1.0, 2), "social_sciences": (0.0, 2), "other": (0.0, 2),
    }  # fmt: skip
    assert rows["nutrition"] == (0.0, 1)


@pytest.mark.parametrize("name", ELSEWHERE)
def test_tasks_of_other_tools_are_explained(name: str) -> None:
    with pytest.raises(ConfigError, match=ELSEWHERE[name]):
        make_task(name)
    section = PAGE.read_text("utf-8").partition("## Tasks of other tools")[2].partition("\n## ")[0]
    assert f"`{name}`" in section
    assert ELSEWHERE[name] in section
