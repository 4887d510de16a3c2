"""The held-out evaluation's own parts: what is run, and one table out of runs that were made apart."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from chorale.model.demo import archive
from training import generate
from training.corpus import tools
from training.evaluate import Case, held_out_cases, main, parse, run_cases
from training.net import DemoNet
from training.report import markdown, merge


def test_options_select_the_runs(capsys: pytest.CaptureFixture[str]) -> None:
    one = "--archive demo.safetensors --splits hard --temperatures 1 --families one_call"
    part = parse(one.split())
    assert (part.splits, part.temperatures, part.families) == (("hard",), (1.0,), (tools.one_call,))
    for wrong in ("--splits train", "--families call", "--temperatures warm"):
        with pytest.raises(SystemExit):
            parse(["--archive", "demo.safetensors", *wrong.split()])
        assert wrong.split()[1] in capsys.readouterr().err


def test_families_and_splits_draw_the_cases_of_the_whole_run() -> None:
    """A process that does a part asks the same questions as one that does everything."""
    whole = held_out_cases(3, "hard")
    part = held_out_cases(3, "hard", families=[tools.one_call])
    asked = [case.ids for case in whole]
    start = asked.index(part[0].ids)
    assert [case.ids for case in part] == asked[start : start + len(part)]
    assert len(part) == 5  # half as many more as the others, for calls that are in the past


def test_batches_are_no_larger_than_asked_for() -> None:
    sizes = []

    def say_nothing(prompts: object, max_new: int, temperature: float, seed: int) -> list[list[int]]:
        sizes.append(len(prompts))  # type: ignore[arg-type]
        return [[]] * sizes[-1]

    cases: list[Case] = held_out_cases(7, families=[tools.two_calls])
    run_cases(cases, say_nothing, 0.0, 4)
    assert sizes == [4, 3]
    assert all(case.finished and not case.well_formed for case in cases)


GREEDY = {
    "sum": {"cases": 4, "harmony": 1.0, "right": 0.75},
    "call": {"cases": 6, "function cases": 5, "harmony": 1.0, "function": 1.0},
    "analysis_tokens": {"low": 3, "high": 40.5},
}
WARM = {"sum": {"cases": 4, "harmony": 1.0, "right": 0.5}, "json": {"cases": 2, "valid": 0}}


def written(folder: Path, tables: dict[str, object], failures: str) -> Path:
    folder.mkdir()
    (folder / "evaluation.json").write_text(json.dumps(tables))
    (folder / "failures.md").write_text(failures)
    return folder


def test_separate_runs_are_merged_to_one_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    warm = written(tmp_path / "a", {"hard, temperature 1": WARM}, "## warm")
    greedy = written(tmp_path / "b", {"greedy": GREEDY}, "## greedy")
    main(["--merge", str(warm), str(greedy), "--out", str(tmp_path / "both")])
    tables = json.loads((tmp_path / "both" / "evaluation.json").read_text())
    assert tables == {"greedy": GREEDY, "hard, temperature 1": WARM}
    assert list(tables) == ["greedy", "hard, temperature 1"]
    assert (tmp_path / "both" / "failures.md").read_text() == "## warm\n\n## greedy"
    shown = capsys.readouterr().out
    assert shown == (tmp_path / "both" / "evaluation.md").read_text()
    assert shown.splitlines() == [
        "| family | check | cases | greedy | hard, temperature 1 |",
        "|---|---|---|---|---|",
        "| sum | harmony | 4 | 100.0% | 100.0% |",
        "| sum | right | 4 | 75.0% | 50.0% |",
        "| call | harmony | 6 | 100.0% |  |",
        "| call | function | 5 | 100.0% |  |",
        "| analysis_tokens | low |  | 3 |  |",
        "| analysis_tokens | high |  | 40.5 |  |",
        "| json | valid | 2 |  | 0.0% |",
    ]


def test_cases_are_named_for_each_run_where_they_differ() -> None:
    more = {"sum": {"cases": 9, "harmony": 1.0}}
    assert "| sum | harmony | 4, 9 |" in markdown({"greedy": GREEDY, "hard, greedy": more})


def test_the_same_run_twice_is_refused(tmp_path: Path) -> None:
    folders = [written(tmp_path / name, {"greedy": GREEDY}, "") for name in "ab"]
    with pytest.raises(ValueError, match="greedy"):
        merge(folders, tmp_path / "both", [])


def test_the_size_of_a_pass_does_not_depend_on_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts are read in parts of a bounded number of tokens, and answered as if read at once."""
    torch.manual_seed(0)
    features = torch.zeros(generate.VOCAB_SIZE, 8).bernoulli_()
    generator = generate.Generator(DemoNet(archive.demo_config(), features, torch.arange(100, 110)), 64)
    prompts = [list(range(100, 100 + size)) for size in (7, 12, 3, 9)]
    sizes: list[int] = []
    forward = generator._forward

    def counted(token_ids: torch.Tensor, *rest: Any) -> torch.Tensor:
        sizes.append(token_ids.numel())
        return forward(token_ids, *rest)

    monkeypatch.setattr(generator, "_forward", counted)
    at_once = generator.generate(prompts, 4, 0.0)
    assert max(sizes) == 48
    sizes.clear()
    monkeypatch.setattr(generate, "MAX_PREFILL", 24)
    assert generator.generate(prompts, 4, 0.0) == at_once
    assert max(sizes) <= 24
