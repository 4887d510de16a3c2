"""The functions that the code inside can call: WASI preview 1, here and in ``file_calls``.

No function opens, resolves or starts anything on the host. Nothing else exists inside: there are no sockets,
processes, other file systems or environment variables.
"""

from __future__ import annotations

import functools
import os
import struct
import time
from collections.abc import Callable

from chorale.tools.python.wasm.file_calls import FileCalls
from chorale.tools.python.wasm.files import Errno, FileError, Files
from chorale.tools.python.wasm.linear import MAX_PIECE, U32


class Calls(FileCalls):
    """One method per function, under WASI's names. Methods return nothing and may raise ``FileError``."""

    def __init__(self, files: Files, arguments: list[str], environment: dict[str, str]) -> None:
        super().__init__(files)
        self._lists = {
            "args": [a.encode() + b"\0" for a in arguments],
            "environ": [f"{k}={v}".encode() + b"\0" for k, v in environment.items()],
        }

    def functions(self) -> dict[str, Callable[..., int]]:
        names = [name for name in dir(self) if name.split("_")[0] in _GROUPS]
        return {name: _guarded(getattr(self, name)) for name in names}

    # ------------------------------------------------------------------ start and end

    def _sizes(self, which: str, count: int, size: int) -> None:
        items = self._lists[which]
        self.memory.pack(count, "<I", len(items))
        self.memory.pack(size, "<I", sum(map(len, items)))

    def _items(self, which: str, pointers: int, address: int) -> None:
        for n, item in enumerate(self._lists[which]):
            self.memory.pack(pointers + 4 * n, "<I", address & U32)
            self.memory.write(address, item)
            address += len(item)

    def args_sizes_get(self, count: int, size: int) -> None:
        self._sizes("args", count, size)

    def args_get(self, pointers: int, address: int) -> None:
        self._items("args", pointers, address)

    def environ_sizes_get(self, count: int, size: int) -> None:
        self._sizes("environ", count, size)

    def environ_get(self, pointers: int, address: int) -> None:
        self._items("environ", pointers, address)

    def proc_exit(self, code: int) -> None:
        os._exit(code & 0x7F)

    # ------------------------------------------------------------------ time and random numbers

    def clock_res_get(self, _clock: int, result: int) -> None:
        self.memory.pack(result, "<Q", 1000)

    def clock_time_get(self, clock: int, _precision: int, result: int) -> None:
        self.memory.pack(result, "<Q", _now(clock))

    def random_get(self, address: int, size: int) -> None:
        size &= U32
        for done in range(0, size, MAX_PIECE):
            self.memory.write(address + done, os.urandom(min(MAX_PIECE, size - done)))

    def sched_yield(self) -> None:
        time.sleep(0)

    def poll_oneoff(self, subscriptions: int, events: int, count: int, num_events: int) -> None:
        """Waits for the nearest clock; files and pipes are always ready."""
        waits: list[tuple[float, bytes, int]] = []
        for n in range(min(count & U32, 1024)):
            data = self.memory.read(subscriptions + 48 * n, 48)
            kind = data[8]
            seconds = _seconds_until(data) if kind == 0 else 0.0
            waits.append((seconds, data[:8], kind))
        if not waits:
            raise FileError(Errno.INVAL)
        nearest = max(0.0, min(wait for wait, _, _ in waits))
        time.sleep(min(nearest, 1e6))
        ready = [(user, kind) for wait, user, kind in waits if wait <= nearest]
        for n, (user, kind) in enumerate(ready):
            self.memory.write(events + 32 * n, user + struct.pack("<HB", 0, kind) + bytes(21))
        self.memory.pack(num_events, "<I", len(ready))

    # ------------------------------------------------------------------ no sockets

    def sock_accept(self, *_values: int) -> None:
        raise FileError(Errno.NOTSOCK)

    sock_recv = sock_send = sock_shutdown = sock_accept


_GROUPS = ("args", "environ", "proc", "clock", "random", "sched", "poll", "fd", "path", "sock")


def _guarded(call: Callable[..., None]) -> Callable[..., int]:
    """Wraps a function to return its error number, as WebAssembly requires."""

    @functools.wraps(call)
    def guarded(*values: int) -> int:
        try:
            call(*values)
        except FileError as error:
            return error.errno
        except MemoryError:
            return Errno.NOSPC
        except (OSError, ValueError, OverflowError, struct.error):
            return Errno.IO
        return 0

    return guarded


def _now(clock: int) -> int:
    if clock == 0:
        return time.time_ns()
    if clock == 1:
        return time.monotonic_ns()
    if clock in (2, 3):
        return time.process_time_ns()
    raise FileError(Errno.INVAL)


def _seconds_until(subscription: bytes) -> float:
    clock, nanoseconds, _, flags = struct.unpack_from("<IxxxxQQH", subscription, 16)
    if flags & 1:
        nanoseconds -= _now(clock)
    return float(nanoseconds / 1e9)
