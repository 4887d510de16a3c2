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
import sys
import traceback
from types import CodeType
from typing import Any


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
