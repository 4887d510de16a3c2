"""``benchmarks/offline.py``: what its rates are, and a run of it with the demo on a CPU."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

import chorale
from benchmarks.offline import Case, main, measure, table


def test_rates_are_tokens_of_all_rows_over_seconds() -> None:
    runs = iter([100.0, 2.0, 6.0, 4.0, 12.0])  # the first is the run that compiles
    assert measure(lambda output: next(runs), Case(rows=10, prompt=40, output=5), runs=2) == {
        "decode": [10.0, 5.0],
        "prefill": [200.0, 100.0],
        "whole": [50 / 6, 50 / 12],
    }


def test_a_case_of_one_output_token_has_no_decode_rate() -> None:
    asked: list[int] = []

    def seconds(output: int) -> float:
        asked.append(output)
        return 2.0

    found = measure(seconds, Case(rows=2, prompt=8, output=1), runs=2)
    assert found == {"decode": [], "prefill": [8.0, 8.0], "whole": [1.0, 1.0]}
    assert asked == [1, 1, 1]


@pytest.mark.parametrize("case", ["1:2", "1:2:3:4", "1:2:many"])
def test_a_case_has_three_numbers(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["offline", "chorale", "demo", "--cases", case])
    with pytest.raises(SystemExit) as error:
        main()
    assert error.value.code == 2


def test_the_script_measures_the_demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = tmp_path / "found.json"
    options = json.dumps({"device": "cpu", "max_model_len": 64, "num_threads": 1})
    command = ["offline", "chorale", "demo", "--runs", "2", "--cases", "2:16:4", "1:8:1"]
    monkeypatch.setattr(sys, "argv", [*command, "--options", options, "--json", str(written)])
    assert not main()
    found = json.loads(written.read_text("utf-8"))
    assert found["engine"] == f"chorale {chorale.__version__}"
    assert f"torch {torch.__version__.partition('+')[0]}" in found["versions"]
    assert (found["settings"]["device"], found["settings"]["max_model_len"]) == ("cpu", 64)
    assert found["settings"]["enable_prefix_caching"] is False
    assert found["memory"] > 2**26
    assert [(each["rows"], each["prompt"], each["output"]) for each in found["cases"]] == [
        (2, 16, 4),
        (1, 8, 1),
    ]
    for case, decoded in zip(found["cases"], (2, 0), strict=True):
        assert [len(case[name]) for name in ("decode", "prefill", "whole")] == [decoded, 2, 2]
        assert min(case["prefill"] + case["whole"]) > 0


def test_a_table_has_a_column_for_each_result() -> None:
    cases = [{"rows": 1, "prompt": 8, "output": 4, "decode": [1.0, 3.0], "prefill": [1500.0]}]
    about = dict.fromkeys(("date", "versions", "model", "settings", "device", "end"), "x")
    found = table([about | {"engine": "a", "cases": cases}, about | {"engine": "b", "cases": []}])
    assert [line.replace(" ", "") for line in found.splitlines()[2:4]] == [
        "|1:8/4|decode|2||",
        "|1:8/4|prefill|1,500||",
    ]
