"""The system-call filters, put over a process of their own: what they refuse and what still works."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from chorale.tools.python import seccomp

if seccomp.deny_list() is None:
    pytest.skip("no filter for this machine", allow_module_level=True)

HEADERS = Path("/usr/include")
APPLY = """
import ctypes, errno, json, os, platform, socket, sys, threading
libc = ctypes.CDLL(None, use_errno=True)
column = 0 if platform.machine() == "x86_64" else 1
program = bytes.fromhex(sys.argv[1])
class Program(ctypes.Structure): _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))
libc.prctl(38, 1, 0, 0, 0)
assert libc.prctl(22, 2, ctypes.byref(Program(len(program) // 8, program)), 0, 0) == 0
def call(numbers, *values):
    ctypes.set_errno(0)
    libc.syscall(numbers[column], *values)
    return errno.errorcode.get(ctypes.get_errno(), "")
found = {}
"""
DENIED = """
found["calls"] = {name: call(numbers, -1, -1, -1, -1, -1) for name, numbers in json.loads(sys.argv[2]).items()
                  if numbers[column] is not None}
found["clone3"] = call((435, 435), 0, 0)
found["newer"] = call((463, 463))
found["namespace"] = call((56, 220), 0x10000000 | 17, 0, 0, 0, 0)
found["typing"] = call((16, 29), 0, 0x5412, 0)
for family in (1, 2, 10, 16, 17, 38, 40):
    try:
        socket.socket(family, socket.SOCK_DGRAM if family != 16 else socket.SOCK_RAW).close()
        found[family] = ""
    except OSError as error: found[family] = errno.errorcode[error.errno]
a, b = socket.socketpair()
for option in (7, 8, 32, 33, 9):
    try:
        a.setsockopt(1, option, 1)
        found[f"option {option}"] = ""
    except OSError as error: found[f"option {option}"] = errno.errorcode[error.errno]
child = os.fork()
if child == 0: os._exit(7)
found["fork"] = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
thread = threading.Thread(target=found.update, args=({"thread": 1},)); thread.start(); thread.join()
import subprocess
found["program"] = subprocess.run(["echo", "ok"], capture_output=True, text=True).stdout
print(json.dumps(found))
"""
ALLOWED = """
found["memory"] = len(bytearray(2**24))
for name, act in {"open": lambda: open("/etc/hostname"), "socket": socket.socket, "fork": os.fork,
                  "program": lambda: os.execv("/bin/true", ["true"]), "kill": lambda: os.kill(os.getpid(), 0),
                  "list": lambda: os.listdir("/")}.items():
    try: act(); found[name] = "done"
    except OSError as error: found[name] = errno.errorcode[error.errno]
os.write(1, json.dumps(found).encode())
os._exit(0)
"""


def outcome(code: str, program: bytes | None, *arguments: str) -> dict[str, object]:
    done = subprocess.run(
        [sys.executable, "-I", "-c", APPLY + code, program.hex(), *arguments],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, object] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("column", [0, 1], ids=["x86-64", "arm64"])
def test_the_numbers_are_those_of_the_kernels_headers(column: int) -> None:
    header = HEADERS / ("x86_64-linux-gnu/asm/unistd_64.h", "asm-generic/unistd.h")[column]
    if not header.exists():
        pytest.skip(f"no {header}")
    defined = re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", header.read_text())
    numbers = {name.removeprefix("_"): int(number) for name, number in defined}
    table = seccomp._REFUSED | seccomp._ENOUGH_FOR_WASM
    known = {name: call[column] for name, call in table.items() if name in numbers}  # old headers lack some
    assert len(known) > 50
    assert known == {name: numbers[name] for name in known}


@pytest.mark.parametrize("network", [True, False])
def test_the_deny_list_refuses_dangerous_calls_only(network: bool) -> None:
    # Made harmless by their arguments, should the filter let them through.
    found = outcome(DENIED, seccomp.deny_list(network=network), json.dumps(seccomp._REFUSED))
    calls = found.pop("calls")
    assert isinstance(calls, dict)
    assert len(calls) > 50
    assert set(calls.values()) == {"EPERM"}, calls
    none_of_them = {"17": "EAFNOSUPPORT", "38": "EAFNOSUPPORT", "40": "EAFNOSUPPORT"}
    works = {"1": "", "2": "", "10": "", "16": "", "fork": 7, "thread": 1, "program": "ok\n"}
    if not network:
        works |= {"2": "EAFNOSUPPORT", "10": "EAFNOSUPPORT"}
    elif found["10"] == "EAFNOSUPPORT":  # a machine without IPv6
        works["10"] = "EAFNOSUPPORT"
    sizes = {f"option {number}": "EPERM" for number in (7, 8, 32, 33)} | {"option 9": ""}
    refused = {"clone3": "ENOSYS", "newer": "ENOSYS", "namespace": "EPERM", "typing": "EPERM"}
    assert found == none_of_them | works | refused | sizes


def test_the_allow_list_refuses_all_other_calls() -> None:
    found = outcome(ALLOWED, seccomp.allow_list())
    assert found.pop("memory") == 2**24
    assert set(found.values()) == {"EPERM"}, found


def test_calls_of_another_architecture_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A filter for the other machine: every call of this one must look foreign to it."""
    other = "aarch64" if seccomp.platform.machine() == "x86_64" else "x86_64"
    monkeypatch.setattr(seccomp.platform, "machine", lambda: other)
    program = seccomp.deny_list()
    done = subprocess.run([sys.executable, "-I", "-c", APPLY, program.hex()], capture_output=True, timeout=60)
    assert done.returncode != 0


@pytest.mark.parametrize("machine", ["riscv64", "i686"])
def test_a_machine_without_a_table_has_no_filter(machine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seccomp.platform, "machine", lambda: machine)
    assert seccomp.deny_list() is None
    assert seccomp.allow_list() is None
