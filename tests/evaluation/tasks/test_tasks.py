"""Tasks made from files: other columns, missing parts, parameters of the sentence splitter."""

from __future__ import annotations

import json
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from chorale.errors import ConfigError
from chorale.evaluation import published
from chorale.evaluation.task import Outcome, Sample, Scored
from chorale.evaluation.tasks import make_task
from chorale.evaluation.tasks.ifeval import parameters
from chorale.evaluation.tasks.ifeval.punkt import split_sentences
from chorale.evaluation.tasks.ifeval.words import tokens

DOCS = Path(__file__).parents[3] / "docs" / "evaluation.md"
NAMES = ["gpqa_diamond", "aime25", "mmlu", "mmlu_pro", "gsm8k"]


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


def test_mmlu_pro_needs_five_examples_of_each_category(tmp_path: Path) -> None:
    row = {
        "question_id": 1,
        "question": "q",
        "options": ["a"],
        "answer": "A",
        "category": "law",
        "cot_content": "",
    }
    _write(tmp_path / "test.jsonl", row)
    _write(tmp_path / "validation.jsonl", *[row] * 4)
    with pytest.raises(ConfigError, match="fewer than 5 examples of 'law'"):
        make_task("mmlu_pro", data=tmp_path)


def test_mmlu_breaks_down_by_category_and_subject() -> None:
    task: Any = make_task("mmlu", data=Path("sample"))
    scored = [Scored(one, 0, Outcome(float(place < 4), None)) for place, one in enumerate(task.samples())]
    rows = {row.name: (row.score, row.count) for row in task.breakdowns(scored)}
    assert {name: rows[name] for name in ("stem", "humanities", "social_sciences", "other")} == {
        "stem": (1.0, 2), "humanities": (1.0, 2), "social_sciences": (0.0, 2), "other": (0.0, 2),
    }  # fmt: skip
    assert rows["nutrition"] == (0.0, 1)


def test_ifeval_breaks_down_by_the_metrics_of_the_harness() -> None:
    pytest.importorskip("langdetect")
    task: Any = make_task("ifeval", data=Path("sample"))
    arguments = [("punctuation:no_comma", {}), ("startend:quotation", {})]
    target = [{"id": name, "arguments": given} for name, given in arguments]
    sample = Sample("1", "", target)
    texts = ('"no comma"', "a, b", 'First line,\n"no comma"')
    scored = [Scored(sample, 0, task.grade(sample, 0, text)) for text in texts]
    assert [one.outcome.score for one in scored] == [1.0, 0.0, 0.0]
    rows = {row.name: row.score for row in task.breakdowns(scored)}
    assert rows == {
        "prompt_level_loose_acc": pytest.approx(2 / 3), "inst_level_strict_acc": pytest.approx(2 / 6),
        "inst_level_loose_acc": pytest.approx(4 / 6), "punctuation:no_comma": pytest.approx(1 / 3),
        "startend:quotation": pytest.approx(1 / 3),
    }  # fmt: skip


def test_ifeval_refuses_other_instructions(tmp_path: Path) -> None:
    pytest.importorskip("langdetect")
    row = {"key": 7, "prompt": "p", "instruction_id_list": ["count:words"], "kwargs": [{}]}
    _write(tmp_path / "train.jsonl", row)
    with pytest.raises(ConfigError, match=r"prompt 7 has unknown instructions: \['count:words'\]"):
        make_task("ifeval", data=tmp_path)


def test_ifeval_without_langdetect_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "langdetect", None)
    with pytest.raises(ConfigError, match=r"pip install '\.\[eval\]'"):
        make_task("ifeval", data=Path("sample"))


def _punkt(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in (
            ("abbrev_types.txt", "xyz\n"), ("collocations.tab", "a\tb\n"),
            ("sent_starters.txt", "the\n"), ("ortho_context.tab", "river\t36\n"),
        ):  # fmt: skip
            archive.writestr(f"punkt_tab/english/{name}", text)
    return path


def test_parameters_of_nltk_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("NLTK_DATA", "")
    monkeypatch.setattr(parameters, "load_file", lambda source: _punkt(tmp_path / "web" / "punkt_tab.zip"))
    assert parameters.find_parameters(tmp_path) is None  # a folder was named: the web is not asked
    for place in (tmp_path / "home/nltk_data/tokenizers", tmp_path):
        path = _punkt(place / "punkt_tab.zip")
        found = parameters.find_parameters(tmp_path)
        assert found is not None
        assert found.abbreviations == {"xyz"}
        path.unlink()
    monkeypatch.setenv("NLTK_DATA", str(tmp_path / "other"))
    _punkt(tmp_path / "other/tokenizers/punkt_tab.zip")
    assert parameters.find_parameters(None) == parameters.read_parameters(
        tmp_path / "other/tokenizers/punkt_tab.zip"
    )
    (tmp_path / "other/tokenizers/punkt_tab.zip").unlink()
    from_web = parameters.find_parameters(None)
    assert from_web is not None
    assert len(split_sentences("See xyz. The end.", from_web)) == 2
    assert len(split_sentences("See xyz. Rivers.", from_web)) == 1
    (tmp_path / "bad.zip").write_bytes(b"PK")
    with pytest.raises(ConfigError, match=r"not NLTK's punkt_tab\.zip"):
        parameters.read_parameters(tmp_path / "bad.zip")


@pytest.mark.parametrize(
    ("model", "name"),
    [
        *(
            (model, "gpt-oss-20b")
            for model in ("openai/gpt-oss-20b", "gpt-oss-20b", "/data/gpt-oss-20b/", "GPT-OSS-20B")
        ),
        ("/c/models--openai--gpt-oss-120b/snapshots/0a1b", "gpt-oss-120b"),
        *(
            (model, "")
            for model in ("demo", "me/gpt-oss-20b-tuned", "my-gpt-oss-20b", "gpt-oss-safeguard-20b", "")
        ),
    ],
)
def test_published_scores_are_those_of_the_model(model: str, name: str) -> None:
    assert {one.model for one in published.lookup(model, "gpqa_diamond", "low")} == (
        {name} if name else set()
    )


def test_published_scores_follow_task_and_effort() -> None:
    scores = [one.score for one in published.lookup("openai/gpt-oss-120b", "aime25", "high")]
    assert scores == [0.925, 0.930]
    medium = published.lookup("gpt-oss-20b", "gpqa_diamond", "medium")
    assert published.lookup("gpt-oss-20b", "gpqa_diamond", "default") == medium != []
    assert published.lookup("gpt-oss-20b", "humaneval", "low") == []


def test_the_docs_have_every_published_score() -> None:
    section = DOCS.read_text("utf-8").split("\n## Published scores\n")[1].split("\n## ")[0]
    for one in published.TABLE:
        rows = [line for line in section.splitlines() if one.source.split(",")[0].split(" (")[0] in line]
        assert any(
            f"{100 * one.score:.1f}" in row and one.model.removeprefix("gpt-oss-") in row for row in rows
        ), one


def test_null_arguments_of_other_instructions_are_left_out(tmp_path: Path) -> None:
    """Files converted by the hub have every argument of every instruction."""
    pytest.importorskip("langdetect")
    given = {"keywords": ["a"], "num_words": None, "relation": "", "frequency": 0}
    row = {"key": 7, "prompt": "p", "instruction_id_list": ["keywords:existence"], "kwargs": [given]}
    _write(tmp_path / "train.jsonl", row)
    (sample,) = make_task("ifeval", data=tmp_path).samples()
    assert sample.target == [{"id": "keywords:existence", "arguments": {"keywords": ["a"]}}]


def test_words_are_split_as_nltk_splits_them() -> None:
    assert tokens("YOU CAN'T. It's \"OK\", Dr. WHO", parameters.built_in()) == [
        "YOU", "CA", "N'T", ".", "It", "'s", "``", "OK", "''", ",", "Dr.", "WHO",
    ]  # fmt: skip
    assert tokens("YOU CAN'T", parameters.built_in()) == ["YOU", "CA", "N'T"]
