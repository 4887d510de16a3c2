"""Runs Python blocks: reads {"page", "source", "folder", "console"} from a line, writes {"out", "error"}.

The blocks of a page share their names, as if a reader pasted one after the other into one session. With
"console", a block must also be readable line by line, as Python 3.11 reads what is pasted into it.
"""

from __future__ import annotations

import code
import contextlib
import io
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType
from typing import Any

from tests.support import ROOT

Execute = Callable[..., str]


@contextlib.contextmanager
def python_child(**environment: str) -> Iterator[Execute]:
    """Yields a function that runs a block in a process of its own, and returns what the block prints."""
    variables = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    variables.pop("CHORALE_MODEL", None)
    command = [sys.executable, "-m", "tests.docs.python_child"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=variables
    ) as process:

        def execute(page: str, source: str, folder: Path, *, console: bool = False) -> str:
            asked = {"page": page, "source": source, "folder": str(folder), "console": console}
            print(json.dumps(asked), file=process.stdin, flush=True)
            done = json.loads(process.stdout.readline())
            assert not done["error"], f"{page}: {done['error']}{done['out']}"
            return str(done["out"])

        yield execute
        process.kill()  # it would spend two seconds on freeing what it imported


class Reader(code.InteractiveConsole):
    """Reads statements as a console does, and runs none."""

    def runcode(self, code: CodeType) -> None:
        pass

    def showsyntaxerror(self, filename: str | None = None, **_: Any) -> None:
        raise


def paste(source: str) -> None:
    """Raises ``SyntaxError`` if a console refuses these lines, followed by Enter."""
    console = Reader()
    for line in [*source.splitlines(), ""]:
        waits = console.push(line)
    if waits:
        raise SyntaxError("the console waits for more lines")


def main() -> None:
    page, names = "", dict[str, Any]()
    for line in sys.stdin:
        block = json.loads(line)
        if block["page"] != page:
            page, names = block["page"], {"__name__": "__main__"}
        os.chdir(block["folder"])
        out, error = io.StringIO(), ""
        with contextlib.redirect_stdout(out):
            try:
                if block["console"]:
                    paste(block["source"])
                exec(compile(block["source"], page, "exec"), names)  # noqa: S102  # blocks of our own pages
            except (Exception, SystemExit):
                error = traceback.format_exc()
        print(json.dumps({"out": out.getvalue(), "error": error}), flush=True)


if __name__ == "__main__":
    main()
