"""Runs Python blocks: reads a line of {"page", "source", "folder"}, writes a line of {"out", "error"}.

The blocks of a page share their names, as if a reader pasted one after the other into one session.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import traceback
from typing import Any


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
                exec(compile(block["source"], page, "exec"), names)  # noqa: S102  # blocks of our own pages
            except (Exception, SystemExit):
                error = traceback.format_exc()
        print(json.dumps({"out": out.getvalue(), "error": error}), flush=True)


if __name__ == "__main__":
    main()
