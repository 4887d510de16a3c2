"""``chorale run-batch``: options, messages and exit codes; kills and interruptions of the whole command."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import sqlite3
import subprocess
import sys
import time
import urllib.error
import urllib.request
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from chorale.cli.commands.serve.run_batch import parser, read_options
from chorale.cli.main import main
from tests.support.event_loop import wait_until
from tests.support.ports import free_port
from tests.support.tools.http_files import HttpFiles


@pytest.fixture
def server() -> Iterator[HttpFiles]:
    with HttpFiles() as found:
        yield found


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def write_input(count: int, **body: Any) -> list[str]:
    names = [f"n{i}" for i in range(count)]
    lines = (
        {"custom_id": name, "method": "POST", "url": "/v1/completions", "body": {"prompt": name} | body}
        for name in names
    )
    Path("in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return names


def output() -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path("out.jsonl").read_text().splitlines()]


def recorded() -> list[str]:
    """Returns the custom ids in the journal."""
    with contextlib.closing(sqlite3.connect("out.jsonl.journal")) as journal:
        rows = journal.execute("SELECT data FROM batch_results").fetchall()
    return [json.loads(zlib.decompress(data))["custom_id"] for (data,) in rows]


FILES = ["-i", "in.jsonl", "-o", "out.jsonl"]


def test_lines_are_sent_to_a_server(server: HttpFiles, capsys: pytest.CaptureFixture[str]) -> None:
    names = write_input(30)
    with Path("in.jsonl").open("a") as file:
        file.write("\nnonsense\n")
    assert main(["run-batch", *FILES, "--base-url", f"{server.url}/v1/", "--max-concurrency", "8"]) == 0
    assert sorted(server.posts) == sorted(names)
    assert [record["custom_id"] for record in output()] == [*names, None]
    assert output()[3]["response"]["body"]["text"] == "n3"
    said = capsys.readouterr().err
    assert re.search(r"31 lines in [\d.]+ s \([\d.]+ a second\): 30 answered, 1 failed", said)
    assert "tokens: 90 input, 60 output" in said
    assert "failed: 1 invalid_json_line" in said
    assert sorted(path.name for path in Path().iterdir()) == ["in.jsonl", "out.jsonl"]


def test_an_output_that_cannot_be_sent_is_kept(server: HttpFiles, capsys: pytest.CaptureFixture[str]) -> None:
    write_input(5)
    server.failures["/out"] = [403]
    command = ["run-batch", "-i", "in.jsonl", "-o", f"{server.url}/out", "--base-url", server.url]
    assert main(command) == 1
    assert "HTTP 403" in capsys.readouterr().err
    assert main(command) == 0
    assert len(server.posts) == 5  # nothing was sent twice
    assert len(server.files["/out"].splitlines()) == 5


@pytest.mark.parametrize(
    ("text", "code", "errors"), [("nonsense\n", 1, ["invalid_json_line"]), ("\n", 0, [])]
)
def test_no_valid_line_gives_only_errors(server: HttpFiles, text: str, code: int, errors: list[str]) -> None:
    Path("in.jsonl").write_text(text)
    assert main(["run-batch", *FILES, "--base-url", server.url]) == code
    assert [record["error"]["code"] for record in output()] == errors


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["-i", "absent", "-o", "out"], "absent: No such file"),
        (["-i", "in.jsonl"], "-o/--output-file"),
        ([*FILES, "--base-url", "localhost:8000"], "http://localhost:8000"),
        ([*FILES, "--base-url", "http://127.0.0.1:9"], "no server at http://127.0.0.1:9"),
        ([*FILES, "--base-url", "http://x", "--max-num-seqs", "4"], "--max-num-seqs: no effect"),
        ([*FILES, "--base-url", "http://x", "--model", "demo"], "--model: no effect"),
        ([*FILES, "--base-url", "http://x", "--enable-metrics"], "--enable-metrics: no effect"),
        ([*FILES, "--max-concurrency", "0"], "at least 1"),
        ([*FILES, "--out-put-file", "x"], "unknown option --out-put-file"),
        ([*FILES, "--model", "/nowhere/at/all"], "/nowhere/at/all"),
        ([*FILES, "--data-parallel-backend", "ray"], "this machine only"),
        ([*FILES, "demo", "other"], "only one model can be given"),
    ],
)
def test_invalid_command_lines_are_refused(
    options: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write_input(1)
    assert main(["run-batch", *options]) == 2
    assert said in capsys.readouterr().err
    assert [path.name for path in Path().iterdir()] == ["in.jsonl"]


def test_a_vllm_command_line_is_accepted() -> None:
    line = (
        "--input-file a --output-file b --output-tmp-dir /tmp --response-role assistant --model gpt-oss-20b "
        "-tp 2 --max-log-len 100 --enable-metrics --url 0.0.0.0 --port 9000 --enable-prompt-tokens-details "
        "--enable-force-include-usage --max-num-seqs 64 -O3 --reasoning-parser openai_gptoss --async-sched"
    )
    given, settings = read_options(parser(), line.split(), {})
    assert (given.input_file, given.output_file, given.enable_metrics) == ("a", "b", True)
    assert (settings.server.host, settings.server.port) == ("0.0.0.0", 9000)
    assert (settings.engine.tensor_parallel_size, settings.engine.max_num_seqs) == (2, 64)
    assert settings.engine.async_scheduling
    assert settings.engine.prompt_delay == 0.0  # no interactive client waits
    assert settings.server.response_store == ":memory:"
    assert len(settings.notices) == 4


# --------------------------------------------------------------------------- the command as a process


@contextlib.contextmanager
def started(*arguments: str, module: str = "chorale") -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", module, *arguments]
    root = Path(__file__).parents[3]
    environment = os.environ | {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()


def until_records(process: subprocess.Popen[str], count: int) -> None:
    def enough() -> bool:
        with contextlib.suppress(sqlite3.Error):
            if Path("out.jsonl.journal").exists() and len(recorded()) >= count:
                return True
        assert process.poll() is None, process.stdout and process.stdout.read()
        return False

    wait_until(enough, "enough records")


def finish(process: subprocess.Popen[str]) -> tuple[int, str]:
    said, _ = process.communicate(timeout=120)
    return process.returncode, said


@pytest.mark.slow
def test_twenty_kills_neither_lose_nor_repeat_a_line(server: HttpFiles) -> None:
    """Each line is in the output once, and no recorded line is sent again."""
    names = write_input(1000)
    server.delay = 0.02
    chance = random.Random(3)
    before: list[str] = []
    for _ in range(20):
        with started("run-batch", *FILES, "--base-url", server.url, "--max-concurrency", "4") as process:
            until_records(process, len(before) + chance.randrange(30))
            process.kill()
            process.wait()
        time.sleep(0.05)  # wait for requests in flight
        assert not set(before) & set(server.posts)
        server.posts.clear()
        before = recorded()
        assert len(before) == len(set(before))
    with started("run-batch", *FILES, "--base-url", server.url) as process:
        code, said = finish(process)
    assert code == 0, said
    assert not set(before) & set(server.posts)
    assert [record["custom_id"] for record in output()] == names


FAKE = "tests.support.serve.batch_fake"


def interrupted(**behaviour: Any) -> list[str]:
    """Runs a batch on the fake engine, with a port for metrics, until Ctrl-C. Returns the recorded ids."""
    engine = {"behaviour": {"max_num_seqs": 4} | behaviour, "limits": {"restart_delay": 0.05}}
    port = free_port()
    metrics = ["--enable-metrics", "--port", str(port), "--no-progress"]
    with started(json.dumps(engine), *FILES, *metrics, module=FAKE) as process:
        until_records(process, 10)
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as response:
            assert b"vllm:" in response.read()
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=10)
        process.send_signal(signal.SIGINT)
        code, said = finish(process)
    assert code == 130, said
    assert "the same command sends the others" in said
    return recorded()


def test_an_interrupted_run_keeps_its_records() -> None:
    write_input(200, max_tokens=8)
    before = interrupted(step_seconds=0.02)
    assert 10 <= len(before) < 200
    assert not Path("out.jsonl").exists()


@pytest.mark.slow
def test_a_run_resumes_after_an_engine_failure_and_an_interruption() -> None:
    """The fake engine fails and restarts, Ctrl-C ends the run, and a second run sends the rest."""
    names = write_input(200, max_tokens=8)
    before = interrupted(step_seconds=0.02, fail_at_step=15)
    with started("{}", *FILES, "--no-progress", module=FAKE) as process:
        code, said = finish(process)
    assert code == 0, said
    assert f"resumed: {len(before)} lines are done" in said
    assert [record["custom_id"] for record in output()] == names
    assert all(record["response"]["status_code"] == 200 for record in output())
