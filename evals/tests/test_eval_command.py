"""``chorale eval`` from end to end: scores, retries, the journal, resuming after a kill."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from chorale_evals.graders import regex
from fake_server import Answer, FakeServer, adding, chat

from chorale.cli.main import main
from chorale.requests.openai_client import Retries
from tests.support.event_loop import wait_until


def sums(path: Path, count: int) -> Path:
    lines = [{"id": f"s{a}", "prompt": f"{a} + 1", "answer": a + 1, "grader": "number"} for a in range(count)]
    path.write_text("\n".join(map(json.dumps, lines)), "utf-8")
    return path


def journal(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "journal.jsonl").read_text("utf-8").splitlines()]


def run(*arguments: object) -> int:
    return main(["eval", *map(str, arguments)])


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Retries, "delay", lambda *_: 0.001)


def test_a_run_is_scored_and_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, out = sums(tmp_path / "sums.jsonl", 20), tmp_path / "out"
    options = ("--out", out, "--effort", "low,high", "--repeats", 2, "--seed", 5)
    with FakeServer(adding) as fake:
        assert run(f"file:{file}", "--base-url", fake.url, *options, "--max-tokens", 50) == 0
    shown = capsys.readouterr()
    assert "file:sums.jsonl  low     20        2  85.0 %" in shown.out  # 0, 7 and 14 are wrong
    assert "file:sums.jsonl high: 40/40, 85.0 %" in shown.err
    assert len(fake.bodies) == len(journal(out)) == 80
    assert Counter(body["reasoning_effort"] for body in fake.bodies) == {"low": 40, "high": 40}
    assert {body["max_tokens"] for body in fake.bodies} == {50}
    assert len({body["seed"] for body in fake.bodies}) == 80
    results = json.loads((out / "summary.json").read_text())["results"]
    assert [row["score"] for row in results] == [0.85, 0.85]
    assert results[0]["low"] == pytest.approx(0.640, abs=1e-3)  # interval over 20 samples, not 40 answers
    assert (out / "report.html").stat().st_size > 10_000


def test_failed_requests_are_asked_again_and_wrong_answers_are_not(tmp_path: Path) -> None:
    seen: Counter[str] = Counter()

    def answer(body: dict[str, Any], _: int) -> Answer:
        text = body["messages"][-1]["content"]
        seen[text] += 1
        first = seen[text] == 1
        if text == "1 + 1":
            return (503, {"error": {"message": "busy"}}) if seen[text] < 4 else chat("2")
        if text == "2 + 1":
            return (429, {"error": {"message": "slow down"}}) if first else chat("3")
        if text == "3 + 1":
            return 200, b"{broken"
        if text == "4 + 1":
            return 400, {"error": {"message": "too long"}}
        if text == "5 + 1":
            return chat("", finish_reason="length", reasoning="so long")
        if text == "6 + 1":
            return 500, {"error": "broken"}
        return chat("0")

    file, out = sums(tmp_path / "sums.jsonl", 8), tmp_path / "out"
    with FakeServer(answer) as fake:
        assert run(f"file:{file}", "--base-url", fake.url, "--out", out) == 1
        records = {record["sample"]: record for record in journal(out)}
        assert [records[f"s{a}"]["score"] for a in range(8)] == [0, 1, 1, 0, 0, 0, 0, 0]
        assert [records[f"s{a}"]["status"] for a in (0, 3, 4, 5, 6)] == [
            "answered",
            "failed",
            "refused",
            "answered",
            "failed",
        ]
        assert records["s5"]["finish"] == "length"
        assert "HTTP 400: too long" in records["s4"]["detail"]["error"]
        assert (seen["0 + 1"], seen["1 + 1"], seen["4 + 1"], seen["6 + 1"]) == (1, 4, 1, 12)
        before = dict(seen)
        assert run(f"file:{file}", "--base-url", fake.url, "--out", out) == 1
    again = {text for text in seen if seen[text] != before[text]}
    assert again == {"3 + 1", "4 + 1", "6 + 1"}
    summary = json.loads((out / "summary.json").read_text())["results"][0]
    assert (summary["scored"], summary["failed"], summary["refused"], summary["cut"]) == (6, 2, 1, 1)


def test_a_run_resumes_with_more_samples_but_not_with_other_settings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, out = sums(tmp_path / "sums.jsonl", 12), tmp_path / "out"
    with FakeServer(adding) as fake:
        same = (f"file:{file}", "--base-url", fake.url, "--out", out)
        assert run(*same, "--resume") == 2
        assert "holds no run" in capsys.readouterr().err
        assert run(*same, "--limit", 5) == 0
        assert run(*same, "--temperature", 0) == 2
        assert "a run with temperature none, and this one has 0.0" in capsys.readouterr().err
        assert run(*same, "--api", "responses") == 2
        assert len(fake.bodies) == 5
        assert run(*same, "--limit", 9, "--resume") == 0
        assert run(*same) == 0
        assert len(fake.bodies) == 12
        sums(file, 13)
        assert run(*same) == 2
        assert "a run with data of file:sums.jsonl sha256:" in capsys.readouterr().err
    assert len({record["sample"] for record in journal(out)}) == 12


def test_a_stopped_run_continues_and_records_no_answer_twice(tmp_path: Path) -> None:
    """Ctrl-C after 15 answers, SIGKILL after 30 more, and a partly written line."""

    def slow(body: dict[str, Any], number: int) -> Answer:
        time.sleep(0.02)
        return adding(body, number)

    file, out = sums(tmp_path / "sums.jsonl", 90), tmp_path / "out"
    with FakeServer(slow) as fake:
        arguments = (f"file:{file}", "--base-url", fake.url, "--out", str(out), "--max-concurrency", "2")
        code, error = stopped(signal.SIGINT, 15, out, *arguments)
        assert (code, error.endswith(f"to continue: the same command with --out {out}\n")) == (130, True)
        before = len(journal_lines(out))
        assert stopped(signal.SIGKILL, before + 30, out, *arguments)[0] == -signal.SIGKILL
        assert len(journal_lines(out)) < 90
        with (out / "journal.jsonl").open("ab") as torn:
            torn.write(b'{"task": "torn')
        assert run(*arguments) == 0
    records = journal(out)
    assert Counter(record["sample"] for record in records) == {f"s{a}": 1 for a in range(90)}
    assert sum(record["score"] for record in records) == 77
    assert 90 <= len(fake.bodies) <= 94  # requests in flight when the run was stopped are sent again


def stopped(number: int, lines: int, out: Path, *arguments: str, seconds: float = 60) -> tuple[int, str]:
    """Starts a run and sends a signal once its journal has ``lines`` lines. Returns (exit code, stderr)."""
    command = [sys.executable, "-m", "chorale.cli.bound", str(os.getpid()), "eval", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)

    def begun() -> bool:
        assert process.poll() is None
        return (out / "journal.jsonl").exists() and len(journal_lines(out)) >= lines

    wait_until(begun, "answers", seconds)
    process.send_signal(number)
    error = process.communicate(timeout=30)[1]
    return process.returncode, error


def journal_lines(folder: Path) -> list[bytes]:
    return (folder / "journal.jsonl").read_bytes().splitlines()


def test_a_folder_accepts_one_run_at_a_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from chorale_evals.journal import Journal

    file, out = sums(tmp_path / "sums.jsonl", 1), tmp_path / "out"
    with Journal(out), FakeServer(adding) as fake:
        assert run(f"file:{file}", "--base-url", fake.url, "--out", out) == 2
        assert "another chorale eval is writing" in capsys.readouterr().err


def test_a_lost_server_ends_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file, out = sums(tmp_path / "sums.jsonl", 60), tmp_path / "out"
    with FakeServer(lambda body, number: (400, {"error": {"message": "no such field"}})) as fake:
        assert run(f"file:{file}", "--base-url", fake.url, "--out", out, "--max-concurrency", 4) == 1
    assert "8 requests in a row got no answer; the last: HTTP 400: no such field" in capsys.readouterr().err
    assert len(fake.bodies) < 16
    with FakeServer(lambda body, number: (401, {"error": {"message": "bad key"}})) as fake:
        assert run(f"file:{file}", "--base-url", fake.url, "--out", tmp_path / "b") == 2
    assert "refuses every request to chat/completions: HTTP 401: bad key" in capsys.readouterr().err


def test_a_run_can_use_the_responses_api(tmp_path: Path) -> None:
    def answer(body: dict[str, Any], _: int) -> Answer:
        output = [
            {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}], "summary": []},
            {"type": "message", "content": [{"type": "output_text", "text": "1"}]},
        ]
        usage = {"input_tokens": 7, "output_tokens": 5, "output_tokens_details": {"reasoning_tokens": 2}}
        return 200, {"status": "completed", "output": output, "usage": usage}

    file, out = sums(tmp_path / "sums.jsonl", 1), tmp_path / "out"
    with FakeServer(answer) as fake:
        options = ("--api", "responses", "--max-tokens", 9, "--temperature", 0, "--out", out)
        assert run(f"file:{file}", "--base-url", fake.url, *options) == 0
    assert fake.paths == ["/v1/responses"]
    assert fake.bodies[0] == {
        "model": "fake", "store": False, "input": [{"role": "user", "content": "0 + 1"}], "temperature": 0.0,
        "max_output_tokens": 9, "reasoning": {"effort": "medium"},
    }  # fmt: skip
    reply = journal(out)[0]["exchanges"][0]["reply"]
    assert reply == {
        "text": "1", "reasoning": "hm", "finish_reason": "stop",
        "usage": {"input": 7, "output": 5, "reasoning": 2},
    }  # fmt: skip


LINES = [
    ("[1]", "Expected `object`, got `array`"),
    ("{", "Expecting property name"),
    ('{"prompt": "x"}', "missing required field `answer`"),
    ('{"prompt": "", "answer": "x"}', "`$.prompt`"),
    ('{"prompt": 5, "answer": "x"}', "`$.prompt`"),
    ('{"prompt": [{"role": "god", "content": "x"}], "answer": "x"}', "`$.prompt[0].role`"),
    ('{"prompt": "x", "answer": "x", "promt": 1}', "unknown field `promt`"),
    ('{"prompt": "x", "answer": "x", "prompt": "y"}', "a name occurs twice"),
    ('{"prompt": "x", "answer": "x", "grader": "fuzzy"}', "'fuzzy'"),
    ('{"prompt": "x", "answer": "x", "grader": {"type": "exact", "case": 1}}', "unknown field `case`"),
    ('{"prompt": "x", "answer": 1, "grader": {"type": "number", "tolerance": "1"}}', "`$.tolerance`"),
    ('{"prompt": "x", "answer": "x", "grader": "number"}', "is not one number"),
    ('{"prompt": "x", "answer": "K", "grader": "choice"}', "one of the letters A to J"),
    ('{"prompt": "x", "answer": "(", "grader": "regex"}', "invalid pattern"),
    ('{"prompt": "x", "answer": {"type": "thing"}, "grader": "json_schema"}', "not a JSON schema"),
    (
        '{"prompt": "x", "answer": {"$ref": "http://example.com/x"}, "grader": "json_schema"}',
        "points outside the schema",
    ),
    ('{"prompt": "x", "answer": "x", "id": {}}', "`$.id`"),
    ('{"prompt": "x", "answer": "x", "request": {"model": "y"}}', "must not set 'model'"),
    ('{"prompt": "good", "answer": "x"}', "the same id as line 1"),
]


@pytest.mark.parametrize(("line", "message"), LINES)
def test_the_error_names_a_bad_line(
    line: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "lines.jsonl"
    file.write_text('{"prompt": "good", "answer": "x"}\n\n' + line + "\n", "utf-8")
    assert run(f"file:{file}", "--base-url", "http://localhost:9", "--out", tmp_path / "out") == 2
    shown = capsys.readouterr().err
    assert f"{file}, line 3: " in shown
    assert message in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("gsm9k", "--model", "demo"), "unknown task 'gsm9k'"),
        (("sample",), "give --model MODEL to start a server, or --base-url"),
        (("sample", "--model", "demo", "--effort", "huge"), "'huge' is not one of"),
        (("sample", "--model", "demo", "--repeats", "0"), "'0' is not a number: it must be at least 1"),
        (("sample", "--base-url", "localhost:8000"), "--base-url localhost:8000: not an http"),
        (("sample", "--base-url", "http://127.0.0.1:9/v1"), "no server at http://127.0.0.1:9/v1"),
        (("file:/nowhere.jsonl", "--model", "demo"), "/nowhere.jsonl: No such file"),
        (("sample", "--base-url", "http://x", "--", "--port", "1"), "options after -- are for a private"),
        (("sample", "--model", "demo", "--outt", "x"), "unknown option --outt; did you mean --out"),
    ],
)  # fmt: skip
def test_mistakes_on_the_command_line_are_named(
    arguments: tuple[str, ...], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert run(*arguments) == 2
    assert message in capsys.readouterr().err


def test_an_unknown_model_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with FakeServer(adding) as fake:
        assert run("sample", "--base-url", fake.url, "--model", "other", "--out", tmp_path / "out") == 2
    assert "the server has no model 'other'; it has fake" in capsys.readouterr().err


def test_calls_are_graded_as_json_and_lines_may_set_fields(tmp_path: Path) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    line = {
        "prompt": "call f", "request": {"tools": [tool], "reasoning_effort": "high"},
        "answer": {"type": "array"},
        "grader": {"type": "json_schema", "equals": [{"name": "f", "arguments": {"x": 1}}]},
    }  # fmt: skip
    (tmp_path / "calls.jsonl").write_text(json.dumps(line))
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    with FakeServer(lambda *_: chat("", tool_calls=[call], finish_reason="tool_calls")) as fake:
        assert run(f"file:{tmp_path}/calls.jsonl", "--base-url", fake.url, "--out", tmp_path / "out") == 0
    assert (fake.bodies[0]["tools"], fake.bodies[0]["reasoning_effort"]) == ([tool], "high")
    assert journal(tmp_path / "out")[0]["score"] == 1.0


def test_a_pattern_that_takes_too_long_does_not_stop_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(regex, "SECONDS", 0.05)
    (tmp_path / "slow.jsonl").write_text(json.dumps({"prompt": "x", "answer": "(a+)+$", "grader": "regex"}))
    with FakeServer(lambda *_: chat("a" * 5000 + "!")) as fake:
        assert run(f"file:{tmp_path}/slow.jsonl", "--base-url", fake.url, "--out", tmp_path / "out") == 0
    assert "needs more than" in journal(tmp_path / "out")[0]["detail"]["reason"]
