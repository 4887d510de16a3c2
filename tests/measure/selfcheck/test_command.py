"""The command ``chorale selfcheck``, on the demo with a private server."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from chorale.measure.selfcheck.table import NAMES
from tests.support.device.faults import environment
from tests.support.event_loop import wait_until
from tests.support.processes import descendants, is_running

RED = ("answers", "harmony", "sampling", "logprobs")
SETTINGS = ("demo", "--device", "cpu", "--kv-cache-memory-bytes", "33554432", "--max-num-seqs", "32")


def selfcheck(*options: str, **more: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "chorale", "selfcheck", *SETTINGS, *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=900, **more)  # type: ignore[call-overload, no-any-return]


@pytest.mark.slow
@pytest.mark.timeout(1000)
def test_all_checks_pass_on_the_demo(tmp_path: Path) -> None:
    done = selfcheck("--json", str(tmp_path / "found.json"))
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    assert [each["verdict"] for each in found["checks"]] == ["ok"] * len(NAMES)
    assert done.stdout.count("OK  ") == len(NAMES)


@pytest.mark.slow
@pytest.mark.timeout(1000)
def test_faults_in_the_code_fail_their_checks() -> None:
    """Four faults at once, because each needs a server: a wrong block table, the norm's epsilon times 10,
    temperature applied twice, and digits grouped in pairs. Other tests plant each fault alone."""
    done = selfcheck("--only", ",".join(RED), "--quick", "--json", "-", env=environment("four_faults"))
    assert done.returncode == 1, done.stderr
    verdicts = {each["name"]: each["verdict"] for each in json.loads(done.stdout)["checks"]}
    assert verdicts == {"start": "ok", "record": "ok", **dict.fromkeys(RED, "failed")}
    assert "FAILED   logprobs" in done.stderr


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_process_outlives_the_command(number: signal.Signals) -> None:
    command = [sys.executable, "-m", "chorale", "selfcheck", *SETTINGS, "--only", "record,grammar"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as running:
        assert running.stdout is not None
        lines = iter(running.stdout.readline, "")
        assert any("start  " in line for line in lines)  # the server and its engine have started
        below = descendants(running.pid)
        assert len(below) >= 2
        running.send_signal(number)
        running.wait(60)
        assert running.returncode != 0
    wait_until(lambda: not any(map(is_running, below)), "the end of all processes", 30)
