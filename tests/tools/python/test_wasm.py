"""The WebAssembly sandbox: what only it has. What every kind does: ``test_python`` and ``test_escapes``."""

from __future__ import annotations

import asyncio
import inspect
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chorale.config.engine import ToolConfig
from chorale.tools.contract import CodeOutput, PythonDetail, ToolCall, ToolResult
from chorale.tools.python.launch import NOBODY
from chorale.tools.python.sandbox import Sandbox, SandboxMissing
from chorale.tools.python.session import Session
from chorale.tools.python.tool import PythonTool, SessionPool, new_container_id
from chorale.tools.python.wasm import module as interpreter
from chorale.tools.python.wasm.calls import Calls
from chorale.tools.python.wasm.files import MAX_NODES, Errno, FileError, Files
from chorale.tools.service import probe_tools
from tests.support.event_loop import run, wait_until
from tests.support.processes import is_running
from tests.tools.python.test_sandboxes import LIMITS, cells, sandbox_of


@pytest.fixture
def sandbox() -> Sandbox:
    return sandbox_of("wasm")


def test_one_process_compiles_while_others_wait(tmp_path: Path) -> None:
    code = f"""
import time
from chorale.tools.python.wasm import module
def load(engine):
    with open({str(tmp_path / "compiled")!r}, "a") as file:
        file.write("x")
    time.sleep(1)
    module._kept_file().write_bytes(b"machine code")
module.make_engine, module.load = lambda: None, load
module.compile_in_child()
assert module.is_compiled()
"""
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    started = [subprocess.Popen([sys.executable, "-c", code], env=environment) for _ in range(3)]
    assert [process.wait(60) for process in started] == [0, 0, 0]
    assert (tmp_path / "compiled").read_text() == "x"


def test_compiling_starts_again_at_normal_priority_when_a_call_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = f"""
import os, time
from chorale.tools.python.wasm import module
def load(engine):
    print(os.nice(0), flush=True)
    while os.nice(0) > {os.nice(0)}:
        time.sleep(0.1)
    module._kept_file().write_bytes(b"machine code")
module.make_engine, module.load = lambda: None, load
module.compile_in_child()
"""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as compiler:
        try:
            assert int(compiler.stdout.readline()) == os.nice(0) + 10
            run(call_waits_and_fails_with_the_self_test())
            assert compiler.communicate(timeout=60)[0] == f"{os.nice(0)}\n"
        finally:
            compiler.kill()
    assert [path.suffix for path in (tmp_path / "chorale" / "wasm").iterdir() if path.suffix != ".lock"] == [
        ".cwasm"
    ]


async def call_waits_and_fails_with_the_self_test() -> None:
    """The call says that it waits for compiling; no later call gets a session either."""
    proven = asyncio.Event()

    async def first() -> None:
        await proven.wait()
        raise SandboxMissing("wasm: does not hold")

    pool = SessionPool(Sandbox("wasm", LIMITS), first=first())
    events = []
    async for event in PythonTool(pool, "cntr_a").call(ToolCall("python", "1", "call")):
        events.append(event)
        if isinstance(event, CodeOutput):
            proven.set()
    _, output, result = events
    assert isinstance(output, CodeOutput)
    assert isinstance(result, ToolResult)
    assert isinstance(result.detail, PythonDetail)
    assert result.failed
    assert "compiling" in output.text
    assert "compiling" not in result.content  # it is no business of the model
    assert result.detail.logs == output.text + result.content
    with pytest.raises(SandboxMissing, match="does not hold"):
        await pool.take("cntr_b", None)
    await pool.aclose()


def test_auto_selects_it_if_nothing_else_is_available(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    found = run(probe_tools(ToolConfig(python="auto"), {}))
    assert found.available["python"].startswith("wasm, CPython 3.12 with its standard library")


async def test_missing_features_raise_errors(sandbox: Sandbox) -> None:
    numpy, process, thread = await cells(
        sandbox, "import numpy", "import subprocess; subprocess.run(['ls'])",
        "import threading; threading.Thread(target=print).start()",
    )  # fmt: skip
    assert "No module named 'numpy'" in numpy.content
    assert "Error" in process.content
    assert "can't start new thread" in thread.content
    tool = PythonTool(SessionPool(sandbox), new_container_id())
    assert "no numpy, pandas, matplotlib" in (tool.namespace.description or "")


async def test_the_standard_library_works(sandbox: Sandbox) -> None:
    work = (
        "import csv, datetime, decimal, fractions, io, json, math, os, random, re, shutil, sqlite3",
        "import statistics, tempfile, zipfile, zoneinfo",
        "with open('a.csv', 'w', newline='') as f: csv.writer(f).writerows([[1, 2], [3, 4]])",
        "db = sqlite3.connect('/tmp/x.db'); db.execute('create table t (a)')",
        "db.executemany('insert into t values (?)', csv.reader(open('a.csv'), delimiter=';')); db.commit()",
        "z = zipfile.ZipFile('a.zip', 'w'); z.write('a.csv'); z.close()",
        "print(db.execute('select count(*) from t').fetchone(), zipfile.ZipFile('a.zip').namelist())",
        "os.makedirs('d/e'); open('d/e/f', 'w').write('x'); shutil.copytree('d', 'c')",
        "print(sorted(os.listdir()), [len(f) for _, _, f in os.walk('c')], tempfile.mkdtemp()[:5])",
        "open('a.csv', 'a').write('5'); print(open('a.csv').read().split(), os.path.getsize('a.csv'))",
        "os.rename('a.csv', '/tmp/b'); os.truncate('/tmp/b', 3); print(open('/tmp/b').read())",
    )
    (result,) = await cells(sandbox, "\n".join(work))
    assert result.content.splitlines() == [
        "(2,) ['a.csv']",
        "['a.csv', 'a.zip', 'c', 'd'] [0, 1] /tmp/",
        "['1,2', '3,4', '5'] 11",
        "1,2",
    ], result.content


# ---------------------------------------------------------------------- the process


def _status(pid: int) -> dict[str, list[str]]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {line.split(":")[0]: line.split()[1:] for line in lines}


async def test_its_process_has_given_up_every_right(sandbox: Sandbox) -> None:
    session = Session(sandbox, new_container_id())
    await session.start()
    status = _status(session._process.pid)
    if os.geteuid() == 0:
        assert status["Uid"] == status["Gid"] == [str(NOBODY)] * 4
        assert int(status["CapEff"][0], 16) == 0
    assert status["NoNewPrivs"] == ["1"]
    assert status["Seccomp"] == ["2"]
    limits = Path(f"/proc/{session._process.pid}/limits").read_text()
    assert any(line.startswith("Max file size") and line.split()[3] == "0" for line in limits.splitlines())
    await session.close()


PARENT = """
import asyncio, sys
from chorale.tools.python.launch import SandboxLimits
from chorale.tools.python.sandbox import Sandbox
from chorale.tools.python.session import Session
async def work():
    session = Session(Sandbox("wasm", SandboxLimits()), "cntr_" + "0" * 48)
    await session.start()
    print(session._process.pid, flush=True)
    async for _ in session.run("while True: pass"): pass
asyncio.run(work())
"""


def test_it_ends_with_its_parent(sandbox: Sandbox) -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    try:
        pid = int(parent.stdout.readline())
        assert _status(pid)["State"]
    finally:
        parent.send_signal(signal.SIGKILL)
        parent.wait()
        if parent.stdout is not None:
            parent.stdout.close()
    wait_until(lambda: not is_running(pid), "the end of the process", 10)


def test_another_interpreter_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wasmtime")
    other = tmp_path / "python.wasm"
    other.write_bytes(b"\0asm\1\0\0\0")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(interpreter, "find", lambda: other)
    with pytest.raises(interpreter.ModuleMissing, match="wrong hash"):
        interpreter.load(None)


def test_compiled_code_is_only_taken_from_a_private_directory(tmp_path: Path) -> None:
    private, shared = tmp_path / "a" / "private", tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    link = tmp_path / "link"
    assert interpreter._is_private(private)
    link.symlink_to(private)
    assert not interpreter._is_private(shared)
    assert not interpreter._is_private(link)


# ---------------------------------------------------------------------- files in memory


def errno_of(call: Callable[[], object]) -> int:
    with pytest.raises(FileError) as caught:
        call()
    return caught.value.errno


def make(files: Files, path: str, data: bytes = b"") -> None:
    node = files.open(files.root, path, create=True, exclusive=False, directory=False)
    files.write(node, 0, data)


def test_files_are_bounded_in_bytes_and_in_number() -> None:
    files = Files(1000)
    make(files, "/tmp/a", bytes(900))
    node = files.find(files.root, "tmp/a")
    assert files.write(node, 900, bytes(200)) == 100  # what there is room for
    assert errno_of(lambda: files.write(node, 1000, b"x")) == Errno.NOSPC
    assert errno_of(lambda: files.write(node, 2**61, b"x")) == Errno.NOSPC
    assert errno_of(lambda: files.resize(node, 2**61)) == Errno.NOSPC
    files.opened(node)
    files.remove(files.root, "/tmp/a", directory=False)
    assert files.num_bytes == 1000  # still open
    files.closed(node)
    assert files.num_bytes == 0
    for n in range(MAX_NODES - 4):
        make(files, f"/mnt/data/{n}")
    assert errno_of(lambda: make(files, "/mnt/data/more")) == Errno.NOSPC
    files.remove(files.root, "/mnt/data/0", directory=False)
    make(files, "/mnt/data/more")


def test_a_replaced_file_gives_its_bytes_back() -> None:
    files = Files(1000)
    make(files, "/tmp/a", bytes(600))
    make(files, "/tmp/b", bytes(300))
    files.rename(files.root, "/tmp/b", files.root, "/tmp/a")
    assert files.num_bytes == 300
    assert errno_of(lambda: files.find(files.root, "/tmp/b")) == Errno.NOENT


@pytest.mark.parametrize(
    ("act", "errno"),
    [
        (lambda f: make(f, "/x"), Errno.ROFS),
        (lambda f: make(f, "/mnt/x"), Errno.ROFS),
        (lambda f: make(f, "/tmp/" + "x" * 256), Errno.NAMETOOLONG),
        (lambda f: make(f, "/tmp/" + "x/" * 4000), Errno.NAMETOOLONG),
        (lambda f: make(f, "/tmp/missing/x"), Errno.NOENT),
        (lambda f: make(f, "/tmp/file/x"), Errno.NOTDIR),
        (lambda f: f.find(f.root, "/tmp/file/"), Errno.NOTDIR),
        (lambda f: f.make_directory(f.root, "/tmp"), Errno.EXIST),
        (lambda f: f.remove(f.root, "/tmp", directory=True), Errno.ROFS),
        (lambda f: f.remove(f.root, "/tmp/d", directory=True), Errno.NOTEMPTY),
        (lambda f: f.remove(f.root, "/tmp/file", directory=True), Errno.NOTDIR),
        (lambda f: f.remove(f.root, "/tmp/d", directory=False), Errno.ISDIR),
        (lambda f: f.rename(f.root, "/tmp/d", f.root, "/tmp/d/e/x"), Errno.INVAL),
        (lambda f: f.rename(f.root, "/tmp/file", f.root, "/tmp/d"), Errno.ISDIR),
        (lambda f: f.rename(f.root, "/mnt/data", f.root, "/tmp/x"), Errno.ROFS),
        (lambda f: f.read(f.find(f.root, "/tmp"), 0, 1), Errno.ISDIR),
    ],
)
def test_invalid_file_operations_return_errors(act: Callable[[Files], object], errno: int) -> None:
    files = Files(1000)
    make(files, "/tmp/file", b"x")
    files.make_directory(files.root, "/tmp/d")
    files.make_directory(files.root, "/tmp/d/e")
    assert errno_of(lambda: act(files)) == errno


def test_dots_stay_below_the_root() -> None:
    files = Files(1000)
    make(files, "/tmp/a", b"x")
    assert files.find(files.root, "../../tmp/../../tmp/./a").size == 1
    assert files.find(files.root, "..") is files.root


class _Bytes:
    """Stands in for wasmtime's memory, which this test is not about."""

    def __init__(self) -> None:
        self.data = bytearray(os.urandom(65536))

    def data_len(self, _store: object) -> int:
        return len(self.data)

    def read(self, _store: object, start: int, end: int) -> bytes:
        assert 0 <= start <= end <= len(self.data)
        return bytes(self.data[start:end])

    def write(self, _store: object, data: bytes, start: int) -> None:
        assert 0 <= start <= start + len(data) <= len(self.data)
        self.data[start : start + len(data)] = data


_NUMBERS = st.one_of(st.integers(-(2**31), 2**31 - 1), st.integers(0, 70000), st.integers(-5, 12))
_LONGS = st.one_of(st.integers(-(2**63), 2**63 - 1), st.integers(0, 4096))


_LONGS_OF = {"fd_seek": {1}, "fd_pread": {3}, "fd_pwrite": {3}, "fd_readdir": {3}, "fd_allocate": {1, 2}}
_WAITING = {"proc_exit", "poll_oneoff", "fd_read", "fd_write"}  # these end, wait, or use this process's pipes


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_no_arguments_break_a_call(data: st.DataObject) -> None:
    """Every function answers with a number, whatever it is given, and stays inside the memory."""
    calls = Calls(Files(10_000), ["python"], {"HOME": "/tmp"})
    calls.memory.bind = (_Bytes(), None)
    functions = calls.functions()
    for _ in range(data.draw(st.integers(1, 12))):
        name = data.draw(st.sampled_from(sorted(functions.keys() - _WAITING)))
        count = len(inspect.signature(functions[name]).parameters)
        longs = _LONGS_OF.get(name, set())
        values = [data.draw(_LONGS if n in longs else _NUMBERS) for n in range(count)]
        answer = functions[name](*values)
        assert isinstance(answer, int)
        assert 0 <= answer <= 76
