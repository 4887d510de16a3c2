"""Commands as a user runs them: help, errors, exit codes, and the processes that they start."""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from chorale.cli.commands.client.terminal import Printer, printable, show
from chorale.cli.commands.measure.bench import BENCHES
from chorale.cli.main import COMMANDS, main
from chorale.machine.folders import sweep
from chorale.requests.openai_client import api_url
from chorale.version import __version__
from tests.support.event_loop import wait_until
from tests.support.processes import descendants, is_running


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "chorale", *arguments], capture_output=True, text=True, timeout=120
    )


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in COMMANDS)


@pytest.mark.parametrize(
    "line",
    [
        "vocab export --help",
        "demo export -h",
        "tools check --help",
        "config show --help",
        "serve demo --help",
    ],
)
def test_help_is_not_taken_as_a_folder(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(line.split()) == 0
    assert "usage" in capsys.readouterr().out


@pytest.mark.parametrize("line", ["vocab export -x", "demo export --out", "vocab export", "demo import d"])
def test_an_export_without_a_folder_is_an_error(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(line.split()) == 2
    assert "usage: chorale" in capsys.readouterr().err


@pytest.mark.parametrize("line", ["vocab export {}/x", "bench report {} --out {}/x.html"])
def test_an_unwritable_path_gives_an_error_that_names_it(
    line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "result.json"
    file.write_text('{"kind": "latency"}')
    assert main(line.replace("{}", str(file)).split()) == 1
    shown = capsys.readouterr().err
    assert shown.startswith("chorale: error: ")
    assert str(file) in shown


def test_windows_is_refused_with_a_hint_at_wsl(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("platform.system", lambda: "Windows")
    assert main(["serve"]) == 2
    shown = capsys.readouterr().err
    assert "WSL 2" in shown
    assert shown.count("\n") == 1
    assert main(["--help"]) == 0


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"chorale {__version__}\n"


def test_a_command_is_imported_with_rare_collections_and_can_be_interrupted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = []

    def look(_: str) -> None:
        seen.append(gc.get_threshold()[0])
        raise KeyboardInterrupt

    gc.set_threshold(700, 10, 10)
    monkeypatch.setattr("importlib.import_module", look)
    assert main(["serve"]) == 130
    assert seen == [50_000]


def test_doctor_is_quick_and_readable() -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = run("doctor")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "OK    vocabulary" in done.stdout
    assert after.ru_utime - before.ru_utime < 4  # CPU time: about 0.5 s; importing torch takes 3 s


def test_collect_env_shows_no_secret(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_canary")
    assert main(["collect-env"]) == 0
    shown = capsys.readouterr().out
    assert "HF_TOKEN: set" in shown
    assert "hf_canary" not in shown


def test_config_show_hides_the_password_of_a_store(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "show", "demo", "--response-store", "postgresql://me:hunter2@db/x"]) == 0
    shown = capsys.readouterr().out
    assert "postgresql://me:***@db/x" in shown
    assert "hunter2" not in shown


def test_a_pipe_gets_the_answer_and_not_the_reasoning(capsys: pytest.CaptureFixture[str]) -> None:
    deltas = [{"reasoning": "They "}, {"reasoning": "add."}, {"content": "4"}, {"content": "2"}]
    choices = [*({"delta": delta} for delta in deltas), {"delta": {}, "finish_reason": "stop"}]
    answer = show([{"choices": [choice]} for choice in choices], Printer())
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == ("42\n", "They add.\n")
    assert (answer.content, answer.reasoning, answer.finish_reason) == ("42", "They add.", "stop")


def test_escape_sequences_of_the_model_are_escaped() -> None:
    assert printable("a\x1b[2Jb\n") == "a\\x1b[2Jb\n"


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    ("command", "number", "when"),
    [
        ("chat demo", signal.SIGHUP, "server"),
        ("chat demo", signal.SIGKILL, "engine"),
        ("bench startup", signal.SIGTERM, "engine"),
    ],
)
def test_a_private_server_ends_with_its_command(
    command: str, number: signal.Signals, when: str, sockets: Path
) -> None:
    """The signal is sent as soon as the server process exists, or once it has an engine process."""
    line = [sys.executable, "-m", "chorale", *command.split()]
    process = subprocess.Popen(
        line,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        env=os.environ | {"TMPDIR": str(sockets), "XDG_RUNTIME_DIR": str(sockets)},
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # nohup ignores it
    )
    num_processes = 1 if when == "server" else 2
    try:
        wait_until(lambda: len(descendants(process.pid)) >= num_processes or process.poll() is not None)
        assert process.poll() is None  # the command is still running
        started = descendants(process.pid)
        process.send_signal(number)
        code = process.wait(120)
        if number != signal.SIGKILL:
            assert code == 128 + number
        wait_until(lambda: not any(map(is_running, started)))
    finally:
        process.kill()
        process.communicate()
    if number != signal.SIGKILL:
        assert list(sockets.iterdir()) == []
    sweep(sockets)  # as the next start does
    assert list(sockets.iterdir()) == []


def test_help_accepts_a_group_a_flag_or_a_word(capsys: pytest.CaptureFixture[str]) -> None:
    def shown(topic: str) -> str:
        assert main(["serve", f"--help={topic}"]) == 0
        return capsys.readouterr().out

    assert shown("tools").startswith("tools:\n")
    assert "--port" not in shown("tools")
    assert shown("Frontend") == shown("server")  # vLLM's name
    assert shown("max-num-seqs") == shown("--max_num_seqs")
    assert shown("max-num-seqs").startswith("  --max-num-seqs N")
    assert "port to listen on (8000)" in shown("port")
    assert shown("enforce-eager").startswith("  --[no-]enforce-eager")
    assert "refused: every module" in " ".join(shown("lora-target-modules").split())  # at any width
    assert "--cudagraph-capture-sizes" in shown("cudagraph")
    assert shown("all") == shown("")
    assert "engine" in shown("listgroup")
    assert main(["serve", "--help=modle"]) == 2
    assert "did you mean model" in capsys.readouterr().err


@pytest.mark.parametrize("columns", [80, 120])
@pytest.mark.parametrize("command", ["", *COMMANDS, *(f"bench {name}" for name in BENCHES)])
def test_help_fits_the_terminal(
    command: str, columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    with contextlib.suppress(SystemExit):  # argparse exits after its help
        main([*command.split(), "--help"])
    shown = capsys.readouterr().out
    assert "usage" in shown
    assert max(map(len, shown.splitlines())) <= columns


def test_config_show_changed_leaves_the_defaults_out(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "show", "--changed", "demo", "--port", "81"]) == 0
    assert [line.split() for line in capsys.readouterr().out.splitlines()] == [
        ["model", "demo", "command", "line"],
        ["port", "81", "command", "line"],
    ]
    assert main(["config", "show", "--changed"]) == 0
    assert "every setting has its default" in capsys.readouterr().out


def test_doctor_shows_how_several_gpus_can_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    from chorale.cli.commands.machine import doctor
    from chorale.machine import facts as machine

    big, small = (machine.Gpu("H200", size * 2**30, size * 2**30, "570") for size in (140, 80))
    monkeypatch.setattr(machine, "gpus", lambda: [big, big, small])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    found = {what: detail for _, what, detail in doctor.check_gpu()}
    assert "--data-parallel-size 3" in found["replicas"]
    assert "fit the smallest" in found["replicas"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a,GPU-b")
    found = {what: detail for _, what, detail in doctor.check_gpu()}
    assert found["gpus"] == "CUDA_VISIBLE_DEVICES shows 2 of 3 to the server: GPU-a, GPU-b"
    assert "--data-parallel-size 2" in found["replicas"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert "replicas" not in {what for _, what, _ in doctor.check_gpu()}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert ("WARN", "gpus") in {(level, what) for level, what, _ in doctor.check_gpu()}


@pytest.mark.parametrize("line", ["--help", "completion bash", "serve --help"])
def test_a_closed_pipe_ends_a_command_without_a_message(line: str) -> None:
    command = [sys.executable, "-u", "-m", "chorale", *line.split()]
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, timeout=120, check=False)
    finally:
        os.close(writing)
    assert (done.returncode, done.stderr) == (1, b"")


def test_run_is_chat_and_an_option_is_not_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert COMMANDS["run"][0] == COMMANDS["chat"][0]
    assert main(["-v"]) == 2
    assert "unknown option -v" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("http://a:1", "http://a:1/v1"),
        ("http://a:1/", "http://a:1/v1"),
        ("http://a:1/v1/", "http://a:1/v1"),
        ("https://a/api/v1", "https://a/api/v1"),
    ],
)
def test_a_server_url_may_end_in_v1(given: str, expected: str) -> None:
    assert api_url(given) == expected
