"""Attempts to get out of each kind of sandbox that this machine has, as this user and, for root, as another.

What the attempts are is in ``escapes``; docs/reference/tools.md promises that none succeeds.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest
import uvloop

from chorale.tools.python.launch import NOBODY
from chorale.tools.python.proof import prove
from chorale.tools.python.sandbox import SandboxKind
from chorale.tools.python.wasm import module as interpreter
from tests.support import ROOT
from tests.support.event_loop import run
from tests.tools.escape_run import MEMORY, forbidden, greedy, shared_bytes
from tests.tools.escapes import FORBIDDEN, GREEDY, SUCCEED_UNHELD
from tests.tools.python.test_sandboxes import sandbox_of

ISOLATED = [kind for kind in get_args(SandboxKind) if kind != "dangerously_use_uv"]


def not_held(outcomes: dict[str, str]) -> dict[str, str]:
    return {name: outcome for name, outcome in outcomes.items() if not outcome.startswith("held: ")}


@pytest.mark.parametrize("kind", ISOLATED)
def test_the_self_test_holds_on_the_servers_event_loop(kind: SandboxKind) -> None:
    """uvloop starts processes in its own way."""
    uvloop.run(prove(sandbox_of(kind)))


@pytest.mark.parametrize("kind", ISOLATED)
def test_code_cannot_escape(kind: SandboxKind) -> None:
    sandbox_of(kind)
    outcomes = run(forbidden(kind))
    assert outcomes.keys() == FORBIDDEN.keys()
    assert not_held(outcomes) == {}


def processes() -> Iterator[str]:
    """The command line of each process of this machine."""
    for place in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            yield place.read_text(errors="replace")
        except OSError:
            continue  # it ended meanwhile


@pytest.mark.parametrize("kind", ISOLATED)
def test_code_cannot_exceed_its_limits(kind: SandboxKind) -> None:
    sandbox_of(kind)
    before = shared_bytes()
    outcomes = run(greedy(kind))
    assert outcomes.keys() == GREEDY.keys()
    assert not_held(outcomes) == {}
    assert shared_bytes() < before + 64 * 2**20
    assert not [pid for pid in processes() if "98765" in pid]  # the process that was to stay


@pytest.fixture
def other_user() -> Iterator[dict[str, object]]:
    """How to run Python as a user without rights, with this environment's packages."""
    if os.geteuid() != 0:
        pytest.skip("only root can become another user; this run is without root already")
    python = Path(os.path.realpath(f"/usr/bin/python3.{sys.version_info.minor}"))
    packages = importlib.util.find_spec("msgspec")
    places = [Path(entry) for entry in (str(ROOT), *sys.path) if os.path.isabs(entry)]
    if not others_reach(python) or packages is None or not packages.origin:
        pytest.skip(f"no Python 3.{sys.version_info.minor} here that another user can run")
    if not others_reach(Path(packages.origin)) or not others_reach(Path(__file__)):
        pytest.skip("another user cannot read this environment's packages")
    home = tempfile.mkdtemp(prefix="chorale-other-")
    try:
        _lend_compiled(Path(home))
        os.chown(home, NOBODY, NOBODY)
        yield {
            "python": str(python),
            "env": {
                "PATH": os.environ["PATH"],
                "HOME": home,
                "TMPDIR": home,
                "PYTHONPATH": os.pathsep.join(
                    str(place) for place in places if not str(place).startswith(sys.base_prefix)
                ),
                "PYTHONDONTWRITEBYTECODE": "1",
            },
        }
    finally:
        shutil.rmtree(home)


def others_reach(path: Path) -> bool:
    if not path.is_file():
        return False
    return bool(path.stat().st_mode & stat.S_IROTH) and all(
        p.stat().st_mode & stat.S_IXOTH for p in path.parents
    )


def _lend_compiled(home: Path) -> None:
    """The compiled interpreter, so that it is not compiled again for one test."""
    kept = interpreter._kept_file()
    if kept is not None and kept.is_file():
        folder = home / ".cache" / "chorale" / "wasm"
        folder.mkdir(parents=True, mode=0o700)
        shutil.copy(kept, folder)
        for path in (home / ".cache", folder.parent, folder, folder / kept.name):
            os.chown(path, NOBODY, NOBODY)


@pytest.mark.parametrize("kind", ISOLATED)
def test_code_cannot_escape_from_a_server_of_another_user(
    kind: SandboxKind, other_user: dict[str, object]
) -> None:
    sandbox_of(kind)
    done = subprocess.run(
        [str(other_user["python"]), "-m", "tests.tools.escape_run", kind, "forbidden", "memory"],
        cwd=ROOT,
        env=other_user["env"],  # type: ignore[arg-type]
        user=NOBODY,
        group=NOBODY,
        extra_groups=[],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    outcomes = json.loads(done.stdout)
    assert outcomes.keys() == {*FORBIDDEN, *MEMORY}
    assert not_held(outcomes) == {}


def test_the_attempts_succeed_without_a_sandbox(monkeypatch: pytest.MonkeyPatch) -> None:
    """In an interpreter without a sandbox, so that the tests above cannot pass for a wrong reason."""
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    sandbox_of("dangerously_use_uv")
    code_of = {name: FORBIDDEN[name] for name in SUCCEED_UNHELD if "/mnt/data" not in FORBIDDEN[name]}
    outcomes = run(forbidden("dangerously_use_uv", tuple(code_of)))
    assert {name for name, outcome in outcomes.items() if outcome.startswith("ESCAPED")} == set(code_of)
