"""The task: its data from folders and wheels, tools, combined scores, and a run against the demo model."""

from __future__ import annotations

import asyncio
import hashlib
import importlib.util
import json
import shutil
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import pytest

from chorale.errors import ConfigError
from chorale.evaluation.server import Endpoint, Server, open_server
from chorale.evaluation.session import RecordingSession
from chorale.evaluation.task import Breakdown, Outcome, Sample, Scored
from chorale.evaluation.tasks.bfcl import Bfcl, bfcl, live, multi_turn, non_live, source
from chorale.evaluation.tasks.bfcl.categories import CATEGORIES, GROUPS, combined
from chorale.evaluation.tasks.bfcl.schema import to_tools, with_hints
from chorale.evaluation.wire import WIRES, Api
from tests.evaluation.bfcl.scripted import ScriptedSession
from tests.support.served import serving

SAMPLE = Path(source.__file__).parents[2] / "samples" / "bfcl"
RIGHT = [[("set_timer", '{"minutes": 5}')], [], [("get_weather", '{"city": "Paris"}')], [], []]


def run(task: Bfcl, name: str, script: Any) -> Outcome:
    sample = next(sample for sample in task.samples() if sample.id == name)
    return asyncio.run(task.run(sample, 0, ScriptedSession(script)))


# ---------------------------------------------------------------------- data


def wheel(folder: Path, *, name: str = "bfcl_eval-2026.3.23-py3-none-any.whl") -> Path:
    """Makes a wheel of the published form from the sample."""
    path = folder / name
    with zipfile.ZipFile(path, "w") as file:
        for place in sorted(SAMPLE.rglob("*.*")):
            inside = place.relative_to(SAMPLE).as_posix()
            under = "bfcl_eval/eval_checker/multi_turn_eval/" if inside.endswith(".py") else "bfcl_eval/data/"
            if place.suffix in (".py", ".json"):
                file.writestr(under + inside, place.read_text())
        info = "bfcl_eval-2026.3.23.dist-info/"
        file.writestr(info + "METADATA", "Metadata-Version: 2.1\nName: bfcl_eval\nVersion: 2026.3.23\n")
        file.writestr(info + "WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr(info + "RECORD", "")
    return path


def test_a_wheel_is_read_without_being_installed(tmp_path: Path) -> None:
    task = multi_turn(data=wheel(tmp_path))
    assert run(task, "multi_turn_base_2", RIGHT).score == 1.0
    assert task.data_revision == "bfcl_eval-2026.3.23"
    assert len(multi_turn(data=tmp_path).samples()) == 6  # the folder of the wheel


def test_an_unpacked_wheel_is_read(tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel(tmp_path)) as file:
        file.extractall(tmp_path / "unpacked")
    assert run(multi_turn(data=tmp_path / "unpacked"), "multi_turn_base_2", RIGHT).score == 1.0
    assert len(non_live(data=tmp_path / "unpacked" / "bfcl_eval").samples()) == 17


def test_the_revision_of_a_folder_depends_on_its_test_cases(tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(SAMPLE, copy)
    before = bfcl(data=copy).data_revision
    assert before == bfcl(data=Path("sample")).data_revision
    answers = copy / "possible_answer" / "BFCL_v4_multiple.json"
    answers.write_text(answers.read_text().replace("Oslo", "Rome"))
    assert bfcl(data=copy).data_revision != before


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda folder: folder, "has neither BFCL_v4_"),
        (lambda folder: folder / "nothing", "no such folder"),
        (lambda folder: _written(folder / "x.whl", "no zip"), "is not a wheel"),
        (lambda folder: _written(folder / "BFCL_v4_simple_python.json", "{").parent, "is not a file of JSON"),
        (lambda folder: _written(folder / "BFCL_v4_irrelevance.json", '{"id": "x"}').parent, "another form"),
        (lambda folder: _written(folder / "BFCL_v4_parallel.json", '{"id": "x"}').parent, "there is no file"),
        (lambda folder: _written(folder / "BFCL_v4_memory.json", "{}").parent, "has none of the categories"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, make: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        bfcl(data=make(tmp_path)).samples()


def _written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_without_an_index_the_error_has_a_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(source.subprocess, "run", _pip("ERROR: No matching distribution found"))
    with pytest.raises(ConfigError, match=r"No matching distribution.*pip download --no-deps bfcl-eval=="):
        bfcl().samples()


def _pip(error: str) -> Any:
    def run(argv: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(argv, 1, "", f"noise\n{error}\n")

    return run


@pytest.mark.slow
def test_the_wheel_is_downloaded_once_and_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if importlib.util.find_spec("pip") is None:
        pytest.skip("this environment has no pip")
    (tmp_path / "index").mkdir()
    published = wheel(tmp_path / "index")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    with pytest.raises(ConfigError, match="is not the published file"):
        bfcl().samples()
    monkeypatch.setattr(source, "SHA256", hashlib.sha256(published.read_bytes()).hexdigest())
    assert len(bfcl().samples()) == 29
    published.unlink()
    assert len(live().samples()) == 6  # from the cache


# ---------------------------------------------------------------------- what the model reads


def test_types_become_those_of_json_schema() -> None:
    items = {"type": "dict", "properties": {"a": {"type": "float", "description": "A."}}}
    properties = {
        "x": {"type": "tuple", "description": "X.", "items": {"type": "array", "items": {"type": "float"}}},
        "y": {"type": "array", "items": items},
        "z": {"type": "any", "description": "Z."},
    }
    function = {
        "name": "a.b.c",
        "description": "D.",
        "parameters": {"type": "dict", "properties": properties},
    }
    before = json.dumps(function)
    tool = to_tools([function])[0]["function"]
    found = tool["parameters"]["properties"]
    assert (tool["name"], tool["parameters"]["type"]) == ("a_b_c", "object")
    assert found["x"]["items"] == {"type": "array", "items": {"type": "number"}}
    described = {"type": "number", "description": "A. This is a float type value.", "format": "float"}
    assert found["y"]["items"] == {"type": "object", "properties": {"a": described}}
    assert found["z"]["type"] == "string"
    assert json.dumps(function) == before


def test_values_of_java_are_strings_with_a_hint() -> None:
    names = {"type": "ArrayList", "description": "N.", "items": {"type": "String"}}
    function = {"name": "f", "description": "D.", "parameters": {"properties": {"names": names}}}
    hinted = with_hints([function], "java")[0]
    assert hinted["description"] == "D. Note that the provided function is in Java 8 SDK syntax."
    assert hinted["parameters"]["properties"]["names"] == {
        "type": "string",
        "description": "N. This is Java ArrayList type parameter in string representation. The list "
        "elements are of type String; they are not in string representation.",
    }


@pytest.mark.parametrize(
    ("name", "calls", "score"),
    [
        ("simple_python_0", [("weather_now", '{"city": "paris", "days": 1}')], 1.0),
        ("simple_python_0", [("weather.now", '{"city": "paris", "days": 1}')], 0.0),
        ("irrelevance_0", [], 1.0),
        ("irrelevance_0", [("weather_now", "{}")], 0.0),
        ("irrelevance_0", [("weather_now", "no JSON")], 1.0),  # as theirs: nothing could be called
        ("live_relevance_0-0-0", [("alarm_set", "{}")], 1.0),
        ("live_relevance_0-0-0", [], 0.0),
    ],
)
def test_single_turns(name: str, calls: Any, score: float) -> None:
    outcome = run(bfcl(data=Path("sample")), name, [calls])
    assert (outcome.score, outcome.detail["reason"] == "right") == (score, score == 1.0)


# ---------------------------------------------------------------------- scores


def test_scores_are_combined_as_the_leaderboard_does() -> None:
    scores = {name: (number % 7 + 1) / 10 for number, name in enumerate(CATEGORIES)}
    counts = {name: number + 1 for number, name in enumerate(CATEGORIES)}
    rows = {row.name: row.score for row in combined(_rows(scores, counts))}
    simple = (scores["simple_python"] + scores["simple_java"] + scores["simple_javascript"]) / 3
    non_live = (simple + scores["multiple"] + scores["parallel"] + scores["parallel_multiple"]) / 4
    calls = ("live_simple", "live_multiple", "live_parallel", "live_parallel_multiple")
    live = sum(scores[name] * counts[name] for name in calls) / sum(counts[name] for name in calls)
    irrelevance = (scores["irrelevance"] + scores["live_irrelevance"]) / 2
    turns = sum(scores[name] for name in GROUPS["multi_turn"]) / 4
    overall = (10 * non_live + 10 * live + 10 * irrelevance + 30 * turns) / 60
    names = ("simple", "non_live", "live", "irrelevance_all", "multi_turn", "overall_without_agentic")
    expected = (simple, non_live, live, irrelevance, turns, overall)
    assert rows == pytest.approx(dict(zip(names, expected, strict=True)))


def test_a_score_without_all_its_categories_is_left_out() -> None:
    present = {name: 0.5 for name in CATEGORIES if name != "simple_java"}
    rows = combined(_rows(present, dict.fromkeys(present, 4)))
    assert [row.name for row in rows] == ["live", "irrelevance_all", "multi_turn"]


def _rows(scores: dict[str, float], counts: dict[str, int]) -> dict[str, Breakdown]:
    return {name: Breakdown(name, score, counts[name]) for name, score in scores.items()}


def test_the_vllm_issue_s_multi_turn_score_is_the_mean_of_its_categories() -> None:
    """Published for gpt-oss-120b: 62.5, 57.5, 50.0 and 57.0, together 56.75."""
    published = dict(zip(GROUPS["multi_turn"], (0.625, 0.575, 0.5, 0.57), strict=True))
    scored = [
        Scored(Sample(f"{name}_{number}", [], [], name), 0, Outcome(float(number < 200 * score), None))
        for name, score in published.items()
        for number in range(200)
    ]
    rows = multi_turn(data=Path("sample")).breakdowns(scored)
    assert rows[-1] == Breakdown("multi_turn", pytest.approx(0.5675), 800)


# ---------------------------------------------------------------------- a run


@pytest.mark.slow
def test_the_demo_model_answers_the_sample(tmp_path: Path) -> None:
    task = bfcl(data=Path("sample"))
    right = ("simple_python_0", "multiple_0", "irrelevance_0", "multi_turn_base_2")
    others = ("simple_javascript_0", "parallel_0", "multi_turn_base_1", "multi_turn_miss_func_0")
    wanted = [sample for sample in task.samples() if sample.id in (*right, *others)]

    async def ask(server: Server, sample: Sample, api: Api) -> Scored:
        session = RecordingSession(server, WIRES[api], "demo", {"temperature": 0, "max_tokens": 200})
        return Scored(sample, 0, await task.run(sample, 0, session))

    async def ask_all(url: str) -> list[Scored]:
        async with open_server(Endpoint(f"{url}/v1")) as server:
            asked = [ask(server, sample, "chat") for sample in wanted]
            asked += [ask(server, sample, "responses") for sample in wanted if sample.id in right]
            return list(await asyncio.gather(*asked))

    with serving("demo", tmp_path) as served:
        scored = asyncio.run(ask_all(served.url))
    scores = [(one.sample.id, one.outcome.score) for one in scored]
    assert len(scores) == 12
    assert [score for name, score in scores if name in right] == [1.0] * 8
    assert scores[wanted.index(_sample(wanted, "multi_turn_base_1"))][1] == 0.0  # too hard for the demo


def _sample(samples: list[Sample], name: str) -> Sample:
    return next(sample for sample in samples if sample.id == name)
