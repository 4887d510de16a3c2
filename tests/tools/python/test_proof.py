"""The self-test refuses a sandbox that is not secure here, and names what is missing."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from chorale.config.engine import ToolConfig
from chorale.tools.python import launch_bubblewrap, sandbox
from chorale.tools.python.launch import GUEST, SandboxLaunch, SandboxLimits, guest_limits
from chorale.tools.python.proof import prove
from chorale.tools.python.sandbox import Sandbox, SandboxMissing
from chorale.tools.service import probe_tools
from tests.support.event_loop import run
from tests.tools.python.test_sandboxes import LIMITS, sandbox_of


def unheld(limits: SandboxLimits) -> SandboxLaunch:
    """An interpreter of this user, with the environment of the server."""
    numbers = guest_limits(limits, processes=False, own_pids=False)
    return SandboxLaunch((sys.executable, "-I", "-u", str(GUEST), numbers), dict(os.environ))


def test_an_interpreter_without_a_sandbox_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHORALE_CANARY", "1")
    monkeypatch.setattr(sandbox, "bubblewrap", unheld)
    with pytest.raises(SandboxMissing) as refused:
        run(prove(Sandbox("bubblewrap", LIMITS)))
    expected = [
        "bubblewrap: refused, since the sandbox is not secure here: ",
        "a file of the server's machine can be read",
        "a port of the server's machine can be reached",
        "variables of the server's environment are visible",
    ]
    if os.getpid() > 1000:  # smaller numbers may be the sandbox's own processes, and are not looked for
        expected.append("a process of the server is visible")
    for what in expected:
        assert what in str(refused.value)


@pytest.mark.parametrize(
    ("python", "shown"), [("/opt/py/bin/python3", ["/opt/py"]), ("/usr/bin/python3", [])]
)
def test_the_interpreter_is_in_the_sandbox(
    python: str, shown: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch_bubblewrap, "_interpreter", lambda for_others: Path(python))
    launch = launch_bubblewrap.bubblewrap(LIMITS)
    assert launch is not None
    bound = [what for option, what in pairwise(launch.argv) if option == "--ro-bind"]
    assert bound == ["/usr", *shown]


def test_a_kind_that_is_refused_is_named_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "bubblewrap", unheld)
    monkeypatch.setattr("chorale.tools.python.presence.shutil.which", lambda name: f"/usr/bin/{name}")
    found = run(probe_tools(ToolConfig(python="bubblewrap"), {}))
    assert "a file of the server's machine can be read" in found.missing["python"]


def without(*parts: str) -> Callable[[SandboxLaunch], SandboxLaunch]:
    def change(launch: SandboxLaunch) -> SandboxLaunch:
        argv = list(launch.argv)
        place = next(n for n in range(len(argv)) if tuple(argv[n : n + len(parts)]) == parts)
        del argv[place : place + len(parts)]
        return replace(launch, argv=tuple(argv))

    return change


def without_user(launch: SandboxLaunch) -> SandboxLaunch:
    return replace(launch, argv=launch.argv[launch.argv.index(str(shutil.which("bwrap"))) :])


def without_settings(launch: SandboxLaunch) -> SandboxLaunch:
    argv, kept = list(without_user(launch).argv), []
    while argv:
        if argv[0] == "--ro-bind-try" and argv[1].startswith("/proc/"):
            del argv[:3]
        else:
            kept.append(argv.pop(0))
    return replace(launch, argv=tuple(kept))


@pytest.mark.parametrize(
    ("change", "broken"),
    [
        (without("--remount-ro", "/dev"), "a file can be created in /dev/"),
        (without("--seccomp", "{filter}"), "there is no system-call filter"),
        (without("--size", str(LIMITS.disk_bytes)), "/tmp has no limit"),
        (without_settings, "settings of the kernel can be written"),
    ],
    ids=["dev", "filter", "tmpfs", "settings"],
)
def test_bubblewrap_without_one_of_its_parts_is_refused(
    change: Callable[[SandboxLaunch], SandboxLaunch], broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = sandbox_of("bubblewrap")
    if change is without_settings and os.geteuid() != 0:
        pytest.skip("the settings are writable for a server that runs as root")

    def changed(limits: SandboxLimits) -> SandboxLaunch:
        launch = launch_bubblewrap.bubblewrap(limits)
        assert launch is not None
        return change(launch)

    monkeypatch.setattr(sandbox, "bubblewrap", changed)
    with pytest.raises(SandboxMissing, match=broken):
        run(prove(held))


def test_root_without_a_python_for_other_users_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(launch_bubblewrap, "_readable_by_others", lambda program: False)
    with pytest.raises(SandboxMissing, match="runs as root"):
        run(prove(Sandbox("bubblewrap", LIMITS)))
