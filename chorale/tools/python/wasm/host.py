"""The process of a WebAssembly session: loads the interpreter, drops all privileges, and runs it.

It takes one JSON argument. Its pipes are the guest's: requests on standard input, output on standard output.
It ends with its parent or with any fault of the runtime, which cannot affect the server's process.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from typing import Any

from chorale.machine.processes import die_with_parent
from chorale.tools.python.seccomp import allow_list
from chorale.tools.python.wasm import module as interpreter
from chorale.tools.python.wasm.calls import Calls
from chorale.tools.python.wasm.files import Files

_PR_SET_DUMPABLE, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 4, 22, 38
_FILTER_MODE = 2
_NOBODY = 65534


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))


def main() -> None:
    start = json.loads(sys.argv[1])
    die_with_parent(start["parent_pid"])
    try:
        instance, store = _prepare(start)
    except interpreter.ModuleMissing as missing:
        sys.exit(str(missing))
    try:
        instance.exports(store)["_start"](store)
    except BaseException as fault:  # a WebAssembly trap: stack overflow or invalid memory access
        os.write(1, f"\n[{type(fault).__name__}: {str(fault).splitlines()[-1][:200]}]\n".encode())
        os._exit(70)
    os._exit(0)


def _prepare(start: dict[str, Any]) -> tuple[Any, Any]:
    from wasmtime import FuncType, Linker, Store, ValType

    interpreter.compile_in_child()
    engine = interpreter.make_engine()
    module = interpreter.load(engine)
    calls = Calls(Files(start["disk_bytes"]), start["arguments"], start["environment"])
    store = Store(engine)
    store.set_limits(memory_size=start["memory_bytes"], instances=1, memories=1, tables=4)
    linker, functions = Linker(engine), calls.functions()
    for wanted in module.imports:
        name, kind = str(wanted.name), wanted.type
        if wanted.module != "wasi_snapshot_preview1" or not isinstance(kind, FuncType):
            raise interpreter.ModuleMissing(f"the interpreter requires {wanted.module}.{name}")
        if name == "proc_exit":
            kind = FuncType([ValType.i32()], [])
        linker.define_func(wanted.module, name, kind, _without_result(functions, name))
    instance = linker.instantiate(store, module)
    calls.memory.bind = (instance.exports(store)["memory"], store)
    _give_up_rights(start["parent_pid"])
    return instance, store


def _without_result(functions: dict[str, Any], name: str) -> Any:
    """Returns a WASI function without a result: only ``proc_exit``, which never returns."""
    return functions[name] if name != "proc_exit" else lambda code: (functions[name](code), None)[1]


def _give_up_rights(parent_pid: int) -> None:
    """Drops all privileges, so that code that breaks out of the runtime cannot do anything."""
    import resource

    for which, value in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, 0),  # forbids writing to files; pipes are unaffected
        (resource.RLIMIT_NOFILE, 16),
    ):
        resource.setrlimit(which, (value, value))
    if os.geteuid() == 0:
        os.setgroups([])
        os.setgid(_NOBODY)
        os.setuid(_NOBODY)
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
    die_with_parent(parent_pid)  # the setting was lost by the change of user
    program = allow_list()
    if program is not None:
        libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        filter_ = _Program(len(program) // 8, program)
        if libc.prctl(_PR_SET_SECCOMP, _FILTER_MODE, ctypes.byref(filter_), 0, 0) != 0:
            sys.exit("the kernel rejects the system-call filter")


if __name__ == "__main__":
    main()
