"""Access to the linear memory of a WebAssembly instance."""

from __future__ import annotations

import struct
from typing import Any

from chorale.tools.python.wasm.files import Errno, FileError

MAX_PIECE = 2**20  # bytes per read or write; the code inside repeats the call for the rest
U32, U64 = 2**32 - 1, 2**64 - 1


class Memory:
    """The linear memory of the instance. Raises ``FileError`` for a range outside it."""

    def __init__(self) -> None:
        self.bind: Any = None  # (wasmtime's memory, its store), set once the instance exists

    def _checked(self, start: int, size: int) -> tuple[int, int]:
        start &= U32
        memory, store = self.bind
        if start + size > memory.data_len(store):
            raise FileError(Errno.FAULT)
        return start, start + size

    def read(self, start: int, size: int) -> bytes:
        size &= U32
        if size == 0:
            return b""
        first, end = self._checked(start, size)
        memory, store = self.bind
        return bytes(memory.read(store, first, end))

    def write(self, start: int, data: bytes) -> None:
        if data:
            first, _ = self._checked(start, len(data))
            memory, store = self.bind
            memory.write(store, data, first)

    def pack(self, start: int, form: str, *values: int) -> None:
        self.write(start, struct.pack(form, *values))

    def text(self, start: int, size: int) -> str:
        if size & U32 > 4096:
            raise FileError(Errno.NAMETOOLONG)
        try:
            text = self.read(start, size).decode("utf-8")
        except UnicodeDecodeError:
            raise FileError(Errno.INVAL) from None
        if "\0" in text:
            raise FileError(Errno.INVAL)
        return text

    def pieces(self, start: int, count: int) -> list[tuple[int, int]]:
        """Returns (address, length) of each part of a scattered read or write, at most 1 MiB in total."""
        found, left = [], MAX_PIECE
        for n in range(min(count & U32, 1024)):
            address, length = struct.unpack("<II", self.read(start + 8 * n, 8))
            found.append((address, min(length, left)))
            left -= min(length, left)
        return found
