"""The python tool in real sandboxes: state, output, every limit, and that nothing is left behind.

Each sandbox that this machine has is tried; one that it lacks is skipped with the operator's reason.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chorale.tools.contract import CodeOutput, CodeStarted, PythonDetail, ToolCall, ToolResult
from chorale.tools.python import session
from chorale.tools.python.launch import SandboxLimits
from chorale.tools.python.memory import tree_bytes
from chorale.tools.python.presence import check_program
from chorale.tools.python.proof import prove
from chorale.tools.python.sandbox import Sandbox, SandboxKind, SandboxMissing
from chorale.tools.python.session import KeptOutput
from chorale.tools.python.tool import PythonTool, SessionPool, new_container_id
from tests.support.event_loop import run, until
from tests.support.processes import children
from tests.support.tools.drive import drive

FRESH = "[a new session: variables and files of earlier calls are gone]\n"
LIMITS = SandboxLimits(
    seconds=5, memory_bytes=192 * 2**20, num_processes=32, disk_bytes=8 * 2**20, output_bytes=4000
)


@functools.cache
def why_missing(kind: SandboxKind) -> str:
    """Empty when the sandbox works; otherwise the words that the banner would use."""
    sandbox = Sandbox(kind, LIMITS)

    async def check() -> None:
        await check_program(sandbox)
        pool = SessionPool(sandbox)
        await pool.take("cntr_try", None)
        await pool.aclose()

    try:
        run(check())
    except SandboxMissing as reason:
        return str(reason)
    return ""


def sandbox_of(kind: SandboxKind, limits: SandboxLimits = LIMITS) -> Sandbox:
    missing = why_missing(kind)
    if missing:
        pytest.skip(missing)
    return Sandbox(kind, limits)


@pytest.fixture(params=get_args(SandboxKind))
def sandbox(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Sandbox:
    # uv of this environment
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    return sandbox_of(request.param)


@contextlib.asynccontextmanager
async def tool_of(sandbox: Sandbox) -> AsyncIterator[PythonTool]:
    pool = SessionPool(sandbox)
    try:
        yield PythonTool(pool, new_container_id())
    finally:
        await pool.aclose()
    assert len(pool) == 0


async def cells(sandbox: Sandbox, *codes: str) -> list[ToolResult]:
    results: list[ToolResult] = []
    async with tool_of(sandbox) as tool:
        for code in codes:
            progress, result = await drive(tool.call, "python", code)
            assert progress[0] == CodeStarted(tool.container_id)
            assert isinstance(result.detail, PythonDetail)
            assert "".join(p.text for p in progress if isinstance(p, CodeOutput)) == result.detail.logs
            results.append(result)
    return results


async def test_cells_behave_as_in_a_notebook(sandbox: Sandbox) -> None:
    first, second, third, fourth, fifth, sixth = await cells(
        sandbox,
        "import math\nx = 6 * 7",
        "print('x is'); x",
        "def f(): return 1 / 0\nf()",
        "def g(:",
        "import sys; print('to stderr', file=sys.stderr); None",
        "x + 1; print('é字')",
    )
    assert "no output" in first.content
    assert second.content == "x is\n42\n"
    assert third.content.endswith("ZeroDivisionError: division by zero\n")
    assert 'File "<cell 4>", line 1, in f' in third.content
    assert not third.failed  # an exception of the code is output, not a failed call
    assert "SyntaxError" in fourth.content
    assert fifth.content == "to stderr\n"
    assert sixth.content == "é字\n"


async def test_exit_and_end_of_input_keep_the_session(sandbox: Sandbox) -> None:
    exited, asked, kept = await cells(sandbox, "y = 5\nimport sys; sys.exit(3)", "input()", "y")
    assert "SystemExit: 3" in exited.content
    assert "EOFError" in asked.content
    assert kept.content == "5\n"


@pytest.mark.parametrize(
    "code",
    [
        "sys.stdout = None; print(1)",
        "sys.stderr = None; sys.exit(1)",
        "sys.stderr.close(); 1 / 0",
        "sys.excepthook = lambda *_: 1 / 0\n1 / 0",
        "class E:\n    def __str__(self): 1 / 0\nsys.exit(E())",
    ],
)
@pytest.mark.parametrize("sandbox", ["dangerously_use_uv"], indirect=True)
async def test_code_that_breaks_error_output_keeps_the_session(sandbox: Sandbox, code: str) -> None:
    broken, kept = await cells(sandbox, f"import os, sys; y = 5\n{code}", "os.write(1, b'%d' % y)")
    assert not broken.failed
    assert kept.content.startswith("5")


async def test_definitions_of_a_cell_are_found_in_main(sandbox: Sandbox) -> None:
    fork = "import multiprocessing\nwith multiprocessing.get_context('fork').Pool(1) as pool:"
    _, pickled, imported, mapped = await cells(
        sandbox,
        "import pickle\nclass A: pass\ndef square(x): return x * x",
        "isinstance(pickle.loads(pickle.dumps(A())), A)",
        "from __main__ import A as B\nB is A",
        f"{fork} print(pool.map_async(square, [3]).get(4))",
    )
    assert pickled.content == imported.content == "True\n"
    assert mapped.content == "[9]\n" or sandbox.kind == "wasm"


async def test_time_is_bounded(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call out of time ends alone, where there are signals; else the session ends, and says so."""
    monkeypatch.setattr(session, "_GRACE_SECONDS", 200.0)  # given only to a guest that has its own timer
    quick = Sandbox(sandbox.kind, SandboxLimits(seconds=0.5, memory_bytes=LIMITS.memory_bytes))
    timed, after = await cells(
        quick, "y = 1\nimport time\nprint('before')\ntime.sleep(60)", "'y' in globals()"
    )
    assert timed.failed
    if sandbox.kind == "wasm":
        gone = "[timed out after 0.5 s] [variables and files of this session are gone]"
        assert timed.content == f"before\n\n{gone}"
        assert after.content == f"{FRESH}False\n"
    else:
        assert timed.content == "before\n\n[timed out after 0.5 s]"
        assert after.content == "True\n"


async def test_code_that_fights_its_timer_is_killed(sandbox: Sandbox) -> None:
    quick = Sandbox(sandbox.kind, SandboxLimits(seconds=0.3, memory_bytes=LIMITS.memory_bytes))
    fight = "import time\nwhile True:\n  try: time.sleep(60)\n  except BaseException: pass"
    killed, fresh = await cells(quick, fight, "1")
    assert killed.failed
    assert "variables and files of this session are gone" in killed.content
    assert fresh.content.startswith("[a new session")


async def test_memory_is_bounded(sandbox: Sandbox) -> None:
    (refused,) = await cells(sandbox, "b = bytearray(512 * 2**20)")
    assert "MemoryError" in refused.content or "died" in refused.content or "memory" in refused.content


@pytest.mark.parametrize("sandbox", ["dangerously_use_uv"], indirect=True)
async def test_memory_of_all_processes_is_bounded(sandbox: Sandbox) -> None:
    (several,) = await cells(
        sandbox,
        "import os, time\nfor _ in range(6):\n  if os.fork() == 0:\n    b = bytearray(b'x') * (60 * 2**20)\n"
        "    time.sleep(30)\ntime.sleep(4)",
    )
    assert several.failed
    assert "of memory" in several.content or "ended" in several.content


async def test_files_in_tmpfs_are_counted_as_memory(sandbox: Sandbox) -> None:
    if sandbox.kind == "dangerously_use_uv":
        pytest.skip("its files are on the disk")
    limits = SandboxLimits(seconds=20, memory_bytes=150 * 2**20, disk_bytes=100 * 2**20)
    fill = "for name in '/tmp/a', '/mnt/data/b': open(name, 'wb').write(bytes(90 * 2**20))"
    code = f"{fill}\nimport time; time.sleep(9)"
    (result,) = await cells(Sandbox(sandbox.kind, limits), code)
    assert "more than 150 MiB of memory" in result.content or "No space left" in result.content


async def test_output_is_bounded_and_counted(sandbox: Sandbox) -> None:
    loud, after = await cells(
        sandbox, "print('a' * 3000)\nfor i in range(3000): print('b' * 99)\nprint('the end')", "1"
    )
    assert len(loud.content) < 4200
    assert loud.content.startswith("aaa")
    assert loud.content.endswith("bbb\nthe end\n")
    assert "bytes of output left out]" in loud.content
    assert after.content == "1\n"


async def test_a_crash_ends_the_session_and_the_next_call_says_so(sandbox: Sandbox) -> None:
    died, fresh = await cells(sandbox, "print('x', flush=True)\nimport os; os._exit(7)", "1")
    assert died.failed
    assert died.content == "x\n\n[the interpreter ended] [variables and files of this session are gone]"
    assert fresh.content == f"{FRESH}1\n"


@pytest.mark.parametrize(
    "code",
    ["import time\nprint('on')\ntime.sleep(60)", "while True: print('x' * 10000)"],
    ids=["silent", "loud"],
)
async def test_closing_a_call_kills_it(sandbox: Sandbox, code: str) -> None:
    """Also if the pipe is full and nobody reads it any more when the session is ended."""
    async with tool_of(sandbox) as tool:
        call = tool.call(ToolCall("python", code, "c"))
        async for event in call:
            if isinstance(event, CodeOutput):
                break
        await asyncio.sleep(0.2)
        async with asyncio.timeout(5):
            await call.aclose()
        _, result = await drive(tool.call, "python", "2")
        assert result.content == f"{FRESH}2\n"


@pytest.mark.parametrize("sandbox", ["dangerously_use_uv"], indirect=True)
async def test_nothing_is_left_running(sandbox: Sandbox) -> None:
    """After a call was left and a pool was closed, this process has no children."""
    before = children(os.getpid())
    async with tool_of(sandbox) as tool:
        await drive(tool.call, "python", "import subprocess; subprocess.Popen(['sleep', '600'])")
        assert children(os.getpid()) != before
    assert children(os.getpid()) == before
    assert tree_bytes(os.getpid()) > 2**20


@pytest.mark.parametrize("sandbox", ["dangerously_use_uv"], indirect=True)
async def test_a_session_that_dies_between_calls_leaves_no_directory(sandbox: Sandbox) -> None:
    pool = SessionPool(sandbox)
    session, _ = await pool.take("cntr_a", None)
    directory = Path(str(session._directory))
    _ = [
        item
        async for item in session.run("import os, threading; threading.Timer(0.1, os._exit, [1]).start()")
    ]
    while session.alive:
        await asyncio.sleep(0.02)
    assert directory.exists()
    _, fresh = await pool.take("cntr_a", None)
    assert fresh
    assert not directory.exists()
    await pool.aclose()


@pytest.mark.parametrize("sandbox", ["dangerously_use_uv"], indirect=True)
async def test_surplus_and_idle_sessions_end(sandbox: Sandbox) -> None:
    pool = SessionPool(sandbox, max_sessions=2)
    for name in ("a", "b", "c"):
        await pool.take(f"cntr_{name}", None)
    assert len(pool) == 2
    _, fresh = await pool.take("cntr_c", None)
    assert not fresh
    _, fresh = await pool.take("cntr_a", None)
    assert fresh
    await pool.aclose()
    idle = SessionPool(sandbox, idle_seconds=0.2)
    await idle.take("cntr_a", None)
    await until(lambda: len(idle) == 0, "the end of the idle session", 5)
    await idle.aclose()


@pytest.mark.parametrize("sandbox", ["dangerously_use_uv"], indirect=True)
async def test_branches_that_start_together_share_one_session(sandbox: Sandbox) -> None:
    pool = SessionPool(sandbox, max_sessions=4)
    taken = await asyncio.gather(*(pool.take("cntr_same", None) for _ in range(5)))
    assert len({id(session) for session, _ in taken}) == 1
    assert [fresh for _, fresh in taken].count(True) == 1
    async with asyncio.TaskGroup() as group:
        for n in range(4):
            group.create_task(pool.take(f"cntr_{n}", None))
    assert len(pool) <= 4
    await pool.aclose()


async def test_missing_requirements_are_reported_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    for kind, remedy in {"bubblewrap": "apt install", "dangerously_use_uv": "pip install uv"}.items():
        with pytest.raises(SandboxMissing, match=remedy):
            await check_program(Sandbox(kind, LIMITS))


OUTPUT = st.lists(
    st.sampled_from([b"\r", b"\n", b"\x1b", "\x9b".encode(), "字".encode()]) | st.binary(max_size=30)
)


@given(OUTPUT.map(b"".join), st.integers(8, 64), st.data())
def test_kept_output_does_not_depend_on_how_it_arrives(
    data: bytes, max_bytes: int, draws: st.DataObject
) -> None:
    def keep(chunks: list[bytes]) -> tuple[str, bytes | None]:
        kept = KeptOutput(max_bytes, b"nonce")
        text = "".join([kept.feed(chunk) for chunk in chunks])
        return text + kept.finish(), kept.letter

    whole = data + b"\0noncek\0"
    chunks, rest = [], whole
    while rest:
        size = draws.draw(st.integers(1, len(rest)))
        chunks.append(rest[:size])
        rest = rest[size:]
    assert keep(chunks) == keep([whole])
    shown, letter = keep([whole])
    assert letter == b"k"
    assert all(c in "\n\t" or not (ord(c) < 32 or 127 <= ord(c) < 160) for c in shown)


def test_what_stands_before_left_out_output_ends_there() -> None:
    kept = KeptOutput(8, b"nonce")
    shown = kept.feed(b"abcde\r" + b"x" * 10 + b"yz\0noncek\0") + kept.finish()
    assert shown == "abcde\n\n[10 bytes of output left out]\nyz"


async def test_control_characters_are_escaped(sandbox: Sandbox) -> None:
    """Colours, titles and cleared screens of a program are not an operator's."""
    (shown,) = await cells(
        sandbox,
        "print('\\x1b[31mred\\x1b[0m\\x1b]0;title\\x07\\x9b2J\\x08\\x00\\tend\\r\\n10%\\r20%\\u202e')",
    )
    assert shown.content == "\\x1b[31mred\\x1b[0m\\x1b]0;title\\x07\\x9b2J\\x08\\x00\tend\n10%\n20%\\u202e\n"


FAKE_DOCKER = """#!{python}
# Stands in for the client of a container engine: keeps its arguments, runs the command as it is.
import os, sys
arguments = sys.argv[1:]
with open({log!r}, "a") as log:
    log.write("\\t".join(a.replace("\\n", " ") for a in arguments)[:4000] + "\\n")
if arguments[0] == "info":
    print('{{"runc": {{}}, "runsc": {{}}}}')
elif arguments[0] == "run":
    command = arguments[arguments.index("python:3.11") + 1 :]
    os.execv({python!r}, command)
"""


@pytest.mark.parametrize("kind", ["docker", "podman", "gvisor"])
async def test_a_container_gets_every_limit_and_is_killed_by_name(
    kind: SandboxKind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where no engine is at hand: that every limit is on its command line, and that it is killed by name."""
    log = tmp_path / "log"
    program = tmp_path / ("podman" if kind == "podman" else "docker")
    program.write_text(FAKE_DOCKER.format(python=sys.executable, log=str(log)))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    sandbox = Sandbox(kind, LIMITS)
    await check_program(sandbox)
    with pytest.raises(SandboxMissing, match="a file of the server's machine can be read"):
        await prove(sandbox)  # this fake engine isolates nothing
    (result,) = await cells(sandbox, "6 * 7")
    assert result.content == "42\n"
    asked = [line.split("\t") for line in log.read_text().splitlines()]
    started = next(line for line in asked if line[0] == "run")
    flags = " ".join(started)
    for wanted in (
        "--network none", f"--memory {192 * 2**20}", "--pids-limit 32", "--read-only", "--cap-drop ALL",
        "--ipc private", "--shm-size 1048576", "--ulimit core=0:0", "--ulimit nofile=256:256",
        "--security-opt no-new-privileges", "--user 65534:65534", "--pull never", "--cpus 1", "--rm",
    ):  # fmt: skip
        assert wanted in flags
    assert ("--runtime runsc" in flags) == (kind == "gvisor")
    name = started[started.index("--name") + 1]
    assert ["kill", name] in asked
