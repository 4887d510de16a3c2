"""The demo answers its held-out questions through ``chorale eval`` as well as after its training."""

from __future__ import annotations

import json
import signal
from collections import Counter
from pathlib import Path

import pytest
from chorale_evals.statistics import wilson
from test_eval_command import journal, journal_lines, stopped

from chorale.cli.main import main
from training.file_task import FAMILIES, lines

TABLE = Path(__file__).parents[2] / "training" / "results" / "evaluation.json"
CHECKS = {"sum": "right", "call": "arguments", "json": "right"}


def test_lines_are_held_out_questions() -> None:
    """They are the first of each family, as ``training.evaluate`` draws them."""
    made = list(lines(7))
    assert Counter(line["group"] for line in made) == {"sum": 3, "call": 2, "json": 2}
    assert [line["id"] for line in made[:3]] == ["sum-0", "sum-1", "sum-2"]
    assert isinstance(made[0]["answer"], int)
    assert made[3]["request"]["tools"]
    assert made[3]["grader"]["equals"][0].keys() == {"name", "arguments"}
    assert made[5]["request"]["response_format"]["json_schema"]["schema"] == made[5]["answer"]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_500_questions_with_a_kill_score_as_in_training(tmp_path: Path) -> None:
    file, out = tmp_path / "held-out.jsonl", tmp_path / "out"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines(500)), "utf-8")
    arguments = [f"file:{file}", "--model", "demo", "--temperature", "0", "--out", str(out)]
    arguments += ["--max-concurrency", "32"]
    assert stopped(signal.SIGKILL, 150, out, *arguments, seconds=600)[0] == -signal.SIGKILL
    assert len(journal_lines(out)) < 500
    assert main(["eval", *arguments]) == 0
    records = journal(out)
    assert set(Counter(record["sample"] for record in records).values()) == {1}
    assert len(records) == 500
    own = json.loads(TABLE.read_text())["greedy"]
    for family in FAMILIES:
        scores = [record["score"] for record in records if record["group"] == family]
        check = CHECKS[family]
        cases = own[family].get(f"{check} cases", own[family]["cases"])
        ours, theirs = wilson(sum(scores) / len(scores), len(scores)), wilson(own[family][check], cases)
        print(f"{family}: {sum(scores):g} of {len(scores)}, in training {own[family][check]:.4f} of {cases}")
        assert ours.low <= theirs.high, family
        assert theirs.low <= ours.high, family
