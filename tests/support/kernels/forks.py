"""Runs scripts of this package, each in a process that is forked where torch and Triton are imported already.

Reads [module, arguments of its ``main``] from a line, and writes [exit status, output].
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
import tempfile
import traceback
from typing import IO, Any

from triton.runtime.cache import triton_key

from tests.support.kernels import compile_kernels, step_memory  # noqa: F401  # imported once


def run(out: IO[str], name: str, arguments: list[Any]) -> int:
    status = 1
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        try:
            importlib.import_module(name).main(*arguments)
            status = 0
        except BaseException:
            traceback.print_exc()
    out.flush()
    return status


def main() -> None:
    triton_key()  # hashes all of Triton
    importlib.import_module("torch._dynamo")  # as operations of meta tensors do
    for line in sys.stdin:
        name, arguments = json.loads(line)
        with tempfile.TemporaryFile("w+") as out:
            child = os.fork()
            if child == 0:
                os._exit(run(out, name, arguments))
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            out.seek(0)
            print(json.dumps([status, out.read()]), flush=True)


if __name__ == "__main__":
    main()
