"""Selection of checks, the child process and the report. A failed check never stops the others."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from pathlib import Path

import pytest

from chorale.cli.commands.measure.selfcheck import line, summary, to_json
from chorale.cli.main import main
from chorale.config.engine import EngineConfig
from chorale.errors import ConfigError
from chorale.measure.selfcheck import child
from chorale.measure.selfcheck.check import Check, Failed, Outcome, Plan, Skipped, outcome_of
from chorale.measure.selfcheck.table import CHECKS, NAMES, select
from tests.support.event_loop import wait_until
from tests.support.processes import is_running

DOCS = Path(__file__).parents[3] / "docs" / "reference" / "evaluation.md"


def test_only_skip_and_quick_select_checks() -> None:
    assert select("", "", quick=False) == CHECKS
    assert [check.name for check in select("", "", quick=True)] == [c.name for c in CHECKS if c.quick]
    assert [check.name for check in select("stops, shapes", "", quick=True)] == ["shapes", "start", "stops"]
    assert [check.name for check in select("logprobs", "", quick=False)] == ["start", "record", "logprobs"]
    assert [check.name for check in select("sampling", "", quick=False)] == ["start", "record", "sampling"]
    assert "stops" not in [check.name for check in select("", "stops", quick=False)]
    with pytest.raises(ConfigError, match="--only stop: not one of shapes"):
        select("stop", "", quick=False)
    with pytest.raises(ConfigError, match="no check"):
        select("stops", "stops,start", quick=False)


def test_the_documentation_lists_all_checks() -> None:
    section = DOCS.read_text("utf-8").partition("## Self-check")[2].partition("\n## ")[0]
    assert re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE) == list(NAMES)


def test_every_exception_of_a_check_becomes_an_outcome() -> None:
    raised = Failed("wrong", {"a": 1}), Skipped("not here"), ZeroDivisionError("by zero\nand more")
    found = [outcome_of("shapes", each, 0.0) for each in (*raised, ExceptionGroup("", raised))]
    assert [each.verdict for each in found] == ["failed", "skipped", "failed", "failed"]
    assert [each.detail for each in found] == ["wrong", "not here", "ZeroDivisionError: by zero", "wrong"]


def outcomes(checks: list[Check], config: EngineConfig) -> list[Outcome]:
    messages = child.device_outcomes(checks, Plan(checks, config, quick=True))
    return [message for message in messages if isinstance(message, Outcome)]


# A child process that behaves as the name of each check says.
CHILD = """
import json, os, signal, sys, time
import msgspec
order = msgspec.msgpack.decode(sys.stdin.buffer.read())
for name in (check["name"] for check in order["checks"]):
    if name == "hangs":
        time.sleep(600)
    if name == "dies":
        print("the device is gone", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    outcome = {"name": name, "verdict": "ok", "detail": str(os.getpid()), "seconds": 0.1, "facts": {}}
    print(json.dumps(outcome), flush=True)
"""


def test_checks_continue_after_one_hangs_or_kills_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "_COMMAND", (sys.executable, "-c", CHILD))
    monkeypatch.setattr(child, "_START_SECONDS", 3.0)
    names = ("one", "hangs", "two", "dies", "three")
    found = outcomes([Check(name, "device", "", 0.2, "") for name in names], EngineConfig())
    assert [each.name for each in found] == list(names)
    assert [each.verdict for each in found] == ["ok", "failed", "ok", "failed", "ok"]
    assert "took longer than" in found[1].detail
    assert found[3].detail == "its process ended (-9): the device is gone"
    for number in (0, 2, 4):
        with pytest.raises(ProcessLookupError):
            os.kill(int(found[number].detail), 0)


def test_a_checkpoint_that_cannot_be_opened_is_reported_once(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    first, second = outcomes([CHECKS[0], CHECKS[2]], EngineConfig(model=str(tmp_path), device="cpu"))
    assert first.verdict == "failed"
    assert "config.json" in first.detail
    assert second.verdict == "skipped"


def test_the_child_process_ends_when_its_parent_is_killed(tmp_path: Path) -> None:
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:  # pragma: no cover
        os.dup2(write, 1)
        os.execv(sys.executable, [sys.executable, "-c", PARENT])
    os.close(write)
    with os.fdopen(read) as lines:
        number = int(lines.readline())
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        wait_until(lambda: not is_running(number), "the child ends", 20)


PARENT = """
import subprocess
from chorale.config.engine import EngineConfig
from chorale.measure.selfcheck import child
from chorale.measure.selfcheck.check import Plan
from chorale.measure.selfcheck.table import CHECKS
kernels = next(check for check in CHECKS if check.name == "kernels")
class Started(subprocess.Popen):
    def __init__(self, *command, **options):
        super().__init__(*command, **options)
        print(self.pid, flush=True)
subprocess.Popen = Started
for _ in child.device_outcomes([kernels], Plan([kernels], EngineConfig())):
    pass
"""


def test_the_report_shows_outcomes_remedies_and_counts(capsys: pytest.CaptureFixture[str]) -> None:
    bad = Outcome("kernels", "failed", "moe is off\x1b[1m", 1.25)
    shown = line(bad, 80)
    assert shown.startswith("FAILED   kernels          1.2 s  each op")
    assert "to do: " in shown
    assert "\x1b" not in shown
    assert max(map(len, shown.splitlines())) <= 80
    good, left = Outcome("stops", "ok", "all", 2.0), Outcome("grammar", "skipped", "random", 0.0)
    assert "not checked: random" in line(left, 80)
    assert summary([bad, good, left], 3.4) == "1 checks passed, 1 skipped, 1 FAILED: kernels; 3 s"
    assert summary([good], 3.4) == "1 checks passed, none failed; 3 s"
    found = to_json([bad, good], 3.4, "demo")
    assert json.loads(json.dumps(found))["ok"] is False
    assert found["checks"][0]["remedy"]
    assert found["checks"][1]["remedy"] is None


def test_the_command_checks_its_options(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["selfcheck", "--list"]) == 0
    assert [row.split()[0] for row in capsys.readouterr().out.splitlines()] == list(NAMES)
    assert main(["selfcheck", "--only", "nothing"]) == 2
    assert main(["selfcheck", "demo", "--no-such-option"]) == 2
    assert main(["selfcheck", "demo", "--data-parallel-backend", "ray"]) == 2
    assert main(["selfcheck", "demo", "--json", str(tmp_path / "none" / "file")]) == 2
    assert "no such folder" in capsys.readouterr().err
