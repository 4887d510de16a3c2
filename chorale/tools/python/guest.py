"""The interpreter inside the sandbox. It is sent there as text and never imported by the server.

Runs with any Python since 3.8 and the standard library alone. One line of JSON on stdin announces a cell
(``{"nonce", "length", "seconds"}``), its bytes follow; what the cell prints goes to stdout, errors included,
then NUL, the nonce, one letter (k: done, e: raised, t: out of time) and NUL. Code from the model may forge
all of this; it only deceives itself, and the server believes nothing but the end of its own waiting.
"""

from __future__ import annotations

import ast
import code
import codeop
import io
import json
import linecache
import os
import signal
import sys
import traceback
import types


class OutOfTime(BaseException):
    """Raised in the running cell by the timer; not an Exception, so that few handlers swallow it."""


class Cells(code.InteractiveInterpreter):
    def __init__(self) -> None:
        # A module, and the one that is found by its name: pickle, multiprocessing, unittest and
        # ``from __main__ import`` look there for what a cell defined.
        self.module = sys.modules["__main__"] = types.ModuleType("__main__")
        super().__init__(vars(self.module))
        self.status = "k"
        self.count = 0
        self.to_code = codeop.Compile()

    def write(self, data: str) -> None:
        sys.stderr.write(data)

    def showtraceback(self) -> None:
        if sys.exc_info()[0] is OutOfTime:
            self.status = "t"  # the server says so in its own words
            return
        self.status = "e"
        super().showtraceback()

    def run_cell(self, source: str) -> str:
        """Statements, then the value of a last expression, as a notebook shows it. Returns the letter."""
        self.status = "k"
        self.count += 1
        name = f"<cell {self.count}>"
        linecache.cache[name] = (len(source), None, source.splitlines(True), name)
        try:
            tree = ast.parse(source, name)
            last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
            parts = [self.to_code(tree, name, "exec")]  # type: ignore[arg-type]
            if last is not None:
                parts.append(self.to_code(ast.Interactive([last]), name, "single"))  # type: ignore[arg-type]
        except SyntaxError:
            self.showsyntaxerror(name)
            return "e"
        except (ValueError, OverflowError, RecursionError, MemoryError):
            self.showtraceback()
            return "e"
        for part in parts:
            self.runcode(part)
            if self.status != "k":
                break
        return self.status


def out_of_time(_signal: int, _frame: object) -> None:
    raise OutOfTime


def set_timer(seconds: float) -> None:
    """WebAssembly has no signals: there the server's own clock ends the session."""
    if hasattr(signal, "setitimer"):
        signal.signal(signal.SIGALRM, out_of_time)
        signal.setitimer(signal.ITIMER_REAL, seconds)


def stop_timer() -> None:
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_REAL, 0)


def run(cells: Cells, source: str, seconds: float) -> str:
    set_timer(seconds)
    try:
        try:
            return cells.run_cell(source)
        except SystemExit as end:
            sys.stderr.write(f"SystemExit: {end.code}\n")
            return "e"
    except OutOfTime:
        return "t"
    except BaseException:  # a stderr or an excepthook of the code's own failed: the variables are still good
        os.write(1, traceback.format_exc().encode("utf-8", "backslashreplace"))
        return "e"
    finally:
        stop_timer()


def apply_limits(limits: dict[str, int]) -> None:
    """What the sandbox itself does not bound. A limit that cannot be set is one that is already lower."""
    try:
        import resource
    except ImportError:  # WebAssembly: its host bounds all of it
        return

    wanted = {
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_AS: limits.get("memory_bytes"),
        resource.RLIMIT_NPROC: limits.get("num_processes"),
        resource.RLIMIT_FSIZE: limits.get("file_bytes"),
        resource.RLIMIT_NOFILE: limits.get("num_files"),
    }
    for which, value in wanted.items():
        if value is not None:
            try:
                resource.setrlimit(which, (value, value))
            except (ValueError, OSError):
                pass


def end_others() -> None:
    """After a cell ran out of time: its processes would go on without anybody waiting for them."""
    try:
        os.kill(-1, signal.SIGKILL)  # everything in this pid namespace but its init and this process
    except OSError:
        pass


def take_requests() -> io.BufferedReader:
    """Standard input, which the code then finds empty; its errors go where its output goes."""
    if sys.platform == "wasi":  # cannot make a second number for a pipe; 1 and 2 are the same one there
        requests = os.fdopen(0, "rb", closefd=False)
        sys.stdin = sys.__stdin__ = io.TextIOWrapper(io.BytesIO())
        os.chdir("/mnt/data")
    else:
        requests = os.fdopen(os.dup(0), "rb")
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(1, 2)
    return requests


def main() -> None:
    limits = json.loads(sys.argv[1])
    apply_limits(limits)
    own_pid = os.getpid()
    requests = take_requests()
    sys.argv = [""]
    cells = Cells()
    while True:
        line = requests.readline()
        if not line:
            return
        request = json.loads(line)
        source = requests.read(request["length"]).decode("utf-8", "replace")
        status = run(cells, source, request["seconds"])
        if os.getpid() != own_pid:
            os._exit(0)  # a fork that ran off the end of its cell
        if status == "t" and limits["own_pids"]:
            end_others()
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except Exception:  # closed, or something that is no stream: the code may put anything there
                pass
        os.write(1, b"\0" + request["nonce"].encode() + status.encode() + b"\0")


if __name__ == "__main__":
    main()
