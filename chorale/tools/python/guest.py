"""The interpreter inside the sandbox. Its source is sent into the sandbox and never imported by the server.

Runs on Python 3.8 or newer with the standard library alone. A line of JSON on stdin announces a cell
(``{"nonce", "length", "seconds"}``), followed by its bytes. Output and errors go to stdout, then NUL, the
nonce, a letter (k: done, e: raised, t: out of time) and NUL. Code from the model can forge all of this, but
affects only its own results: the server relies on nothing but its own timeouts.
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
    """Raised in the running cell by the timer. Not an Exception, so that few handlers catch it."""


class Cells(code.InteractiveInterpreter):
    def __init__(self) -> None:
        # A real module, registered by name: pickle, multiprocessing, unittest and
        # ``from __main__ import`` look up definitions of cells there.
        self.module = sys.modules["__main__"] = types.ModuleType("__main__")
        super().__init__(vars(self.module))
        self.status = "k"
        self.count = 0
        self.to_code = codeop.Compile()

    def write(self, data: str) -> None:
        sys.stderr.write(data)

    def showtraceback(self) -> None:
        if sys.exc_info()[0] is OutOfTime:
            self.status = "t"  # the server reports it
            return
        self.status = "e"
        super().showtraceback()

    def run_cell(self, source: str) -> str:
        """Runs a cell and prints the value of a final expression, as in a notebook.

        Returns the status letter.
        """
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
    """Sets the timer of a cell. WebAssembly has no signals: there the server ends the session."""
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
    except BaseException:  # the code's own stderr or excepthook failed: the variables are intact
        os.write(1, traceback.format_exc().encode("utf-8", "backslashreplace"))
        return "e"
    finally:
        stop_timer()


def apply_limits(limits: dict[str, int]) -> None:
    """Sets limits that the sandbox does not. A limit that cannot be set is already lower."""
    try:
        import resource
    except ImportError:  # WebAssembly: the host sets all limits
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
    """Ends the processes of a cell that has run out of time."""
    try:
        os.kill(-1, signal.SIGKILL)  # all processes in this pid namespace except its init and this process
    except OSError:
        pass


def take_requests() -> io.BufferedReader:
    """Takes over standard input, so that the code finds it empty, and redirects stderr to stdout."""
    if sys.platform == "wasi":  # cannot duplicate a pipe; 1 and 2 are the same pipe there
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
            os._exit(0)  # a forked child reached the end of its cell
        if status == "t" and limits["own_pids"]:
            end_others()
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except Exception:  # the code closed or replaced the stream
                pass
        os.write(1, b"\0" + request["nonce"].encode() + status.encode() + b"\0")


if __name__ == "__main__":
    main()
