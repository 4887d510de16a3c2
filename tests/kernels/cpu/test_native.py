"""``native_check.cpp``: with sanitizers on this processor, and for ARM in an emulator if there is one."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from chorale.kernels.cpu import build

PROGRAM = Path(__file__).with_name("native_check.cpp")
NAMES = {"avx512": "avx512_vnni", "avxvnni": "avx_vnni", "neon": "neon_dotprod", "i8mm": "neon_i8mm"}
SECONDS = 900


def check(command: list[str], sets: list[str], least: int) -> None:
    """Runs the program once for each instruction set that this machine has."""
    ran = 0
    for name in sets:
        done = subprocess.run(
            [*command, NAMES.get(name, name)], capture_output=True, text=True, timeout=SECONDS, check=False
        )
        if done.returncode == 2:
            continue
        assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
        assert "0 failures" in done.stdout
        assert done.stderr == ""
        ran += 1
    assert ran >= least


@pytest.mark.slow
@pytest.mark.timeout(SECONDS)
@pytest.mark.parametrize("sanitizers", ["address,undefined", "thread"])
def test_sanitizers_find_nothing(sanitizers: str, tmp_path: Path) -> None:
    try:
        build.compiler()
    except build.BuildError as error:
        pytest.skip(str(error))
    program = tmp_path / "check"
    flags = (f"-fsanitize={sanitizers}", "-fno-sanitize-recover=all", "-g", "-O1")
    check([str(program)], build.build(program, flags, program=PROGRAM), least=1)


@pytest.mark.slow
@pytest.mark.timeout(SECONDS)
def test_arm_in_an_emulator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Debian: qemu-user, g++-aarch64-linux-gnu."""
    emulator, compiler = shutil.which("qemu-aarch64"), shutil.which("aarch64-linux-gnu-g++")
    if emulator is None or compiler is None:
        pytest.skip("needs qemu-aarch64 and aarch64-linux-gnu-g++")
    monkeypatch.setitem(os.environ, "CXX", compiler)
    program = tmp_path / "check"
    sets = build.build(program, ("-static",), machine="aarch64", program=PROGRAM)
    assert sets == ["neon", "i8mm", "generic"]
    check([emulator, str(program)], sets, least=3)
