"""The file functions of WASI preview 1, over in-memory files and three pipes."""

from __future__ import annotations

import os
import struct
import time
from dataclasses import dataclass

from chorale.tools.python.wasm.files import Errno, FileError, Files, Node
from chorale.tools.python.wasm.linear import U32, U64, Memory

MAX_OPEN_FILES = 256
_FILE, _DIRECTORY, _CHARACTERS = 4, 3, 2  # file types
_CREATE, _OPEN_DIRECTORY, _EXCLUSIVE, _TRUNCATE = 1, 2, 4, 8
_APPEND = 1
_READ_RIGHT, _WRITE_RIGHT = 1 << 1, 1 << 6
_ALL_RIGHTS = (1 << 30) - 1
_ROOT_FD = 3


@dataclass(slots=True)
class OpenFile:
    node: Node
    rights: int = _ALL_RIGHTS
    flags: int = 0
    offset: int = 0


class FileCalls:
    """``fd_*`` and ``path_*``. The pipes are open as 0, 1 and 2, the root directory as 3."""

    def __init__(self, files: Files) -> None:
        self.memory = Memory()
        self._files = files
        self._open: dict[int, OpenFile] = {_ROOT_FD: OpenFile(files.root)}

    # ------------------------------------------------------------------ open files

    def _file(self, fd: int) -> OpenFile:
        if fd not in self._open:
            raise FileError(Errno.SPIPE if 0 <= fd <= 2 else Errno.BADF)
        return self._open[fd]

    def _regular(self, fd: int, right: int) -> OpenFile:
        found = self._file(fd)
        if found.node.is_directory:
            raise FileError(Errno.ISDIR)
        if not found.rights & right:
            raise FileError(Errno.BADF)
        return found

    def fd_read(self, fd: int, pieces: int, count: int, result: int) -> None:
        parts = self.memory.pieces(pieces, count)
        if fd == 0:
            data = os.read(0, min(sum(size for _, size in parts), 65536))
        else:
            found = self._regular(fd, _READ_RIGHT)
            data = self._files.read(found.node, found.offset, sum(size for _, size in parts))
            found.offset += len(data)
        self._scatter(parts, data, result)

    def fd_pread(self, fd: int, pieces: int, count: int, offset: int, result: int) -> None:
        parts = self.memory.pieces(pieces, count)
        found = self._regular(fd, _READ_RIGHT)
        data = self._files.read(found.node, offset & U64, sum(size for _, size in parts))
        self._scatter(parts, data, result)

    def _scatter(self, parts: list[tuple[int, int]], data: bytes, result: int) -> None:
        done = 0
        for address, size in parts:
            self.memory.write(address, data[done : done + size])
            done += size
        self.memory.pack(result, "<I", len(data))

    def _gathered(self, pieces: int, count: int) -> bytes:
        return b"".join(self.memory.read(at, size) for at, size in self.memory.pieces(pieces, count))

    def fd_write(self, fd: int, pieces: int, count: int, result: int) -> None:
        data = self._gathered(pieces, count)
        if fd in (1, 2):
            written = os.write(1, data)
        else:
            found = self._regular(fd, _WRITE_RIGHT)
            if found.flags & _APPEND:
                found.offset = found.node.size
            written = self._files.write(found.node, found.offset, data)
            found.offset += written
        self.memory.pack(result, "<I", written)

    def fd_pwrite(self, fd: int, pieces: int, count: int, offset: int, result: int) -> None:
        found = self._regular(fd, _WRITE_RIGHT)
        written = self._files.write(found.node, offset & U64, self._gathered(pieces, count))
        self.memory.pack(result, "<I", written)

    def fd_seek(self, fd: int, offset: int, whence: int, result: int) -> None:
        found = self._regular(fd, _ALL_RIGHTS)
        start = {0: 0, 1: found.offset, 2: found.node.size}.get(whence)
        if start is None or not 0 <= start + offset < 2**62:
            raise FileError(Errno.INVAL)
        found.offset = start + offset
        self.memory.pack(result, "<Q", found.offset)

    def fd_tell(self, fd: int, result: int) -> None:
        self.memory.pack(result, "<Q", self._file(fd).offset)

    def fd_close(self, fd: int) -> None:
        self._files.closed(self._file(fd).node)
        del self._open[fd]

    def fd_fdstat_get(self, fd: int, result: int) -> None:
        if 0 <= fd <= 2:
            kind, flags, rights = _CHARACTERS, 0, _READ_RIGHT if fd == 0 else _WRITE_RIGHT
        else:
            found = self._file(fd)
            kind, flags, rights = _kind(found.node), found.flags, found.rights
        self.memory.pack(result, "<BxHxxxxQQ", kind, flags, rights, _ALL_RIGHTS)

    def fd_fdstat_set_flags(self, fd: int, flags: int) -> None:
        self._file(fd).flags = flags & 31

    def fd_prestat_get(self, fd: int, result: int) -> None:
        if fd != _ROOT_FD:
            raise FileError(Errno.BADF)
        self.memory.pack(result, "<II", 0, 1)

    def fd_prestat_dir_name(self, fd: int, address: int, size: int) -> None:
        if fd != _ROOT_FD or size < 1:
            raise FileError(Errno.BADF)
        self.memory.write(address, b"/")

    def fd_readdir(self, fd: int, address: int, size: int, cookie: int, result: int) -> None:
        node = self._file(fd).node
        if not node.is_directory:
            raise FileError(Errno.NOTDIR)
        entries = [(".", node), ("..", node), *node.children.items()]
        data = b""
        for n, (name, child) in enumerate(entries[cookie & U64 :], (cookie & U64) + 1):
            coded = name.encode()
            data += struct.pack("<QQIBxxx", n, child.number, len(coded), _kind(child)) + coded
            if len(data) >= size & U32:
                break
        self.memory.write(address, data[: size & U32])
        self.memory.pack(result, "<I", min(len(data), size & U32))

    def fd_filestat_get(self, fd: int, result: int) -> None:
        if 0 <= fd <= 2:
            self.memory.pack(result, "<QQBxxxxxxxQQQQQ", 0, 0, _CHARACTERS, 1, 0, 0, 0, 0)
        else:
            self._status(self._file(fd).node, result)

    def _status(self, node: Node, result: int) -> None:
        kind, times = _kind(node), (node.accessed, node.modified, node.modified)
        self.memory.pack(result, "<QQBxxxxxxxQQQQQ", 1, node.number, kind, 1, node.size, *times)

    def fd_filestat_set_size(self, fd: int, size: int) -> None:
        self._files.resize(self._regular(fd, _WRITE_RIGHT).node, size & U64)

    def fd_filestat_set_times(self, fd: int, accessed: int, modified: int, flags: int) -> None:
        _set_times(self._file(fd).node, accessed, modified, flags)

    def fd_allocate(self, fd: int, offset: int, size: int) -> None:
        node = self._regular(fd, _WRITE_RIGHT).node
        self._files.resize(node, max(node.size, (offset & U64) + (size & U64)))

    def fd_advise(self, fd: int, _offset: int, _size: int, _advice: int) -> None:
        self._file(fd)

    def fd_sync(self, fd: int) -> None:
        self._file(fd)

    def fd_datasync(self, fd: int) -> None:
        self._file(fd)

    # ------------------------------------------------------------------ paths

    def path_open(
        self, fd: int, _lookup: int, address: int, size: int, how: int, rights: int, _inherited: int,
        flags: int, result: int,
    ) -> None:  # fmt: skip
        path = self.memory.text(address, size)
        number = next((n for n in range(_ROOT_FD + 1, MAX_OPEN_FILES) if n not in self._open), None)
        if number is None:
            raise FileError(Errno.MFILE)
        node = self._files.open(
            self._file(fd).node,
            path,
            create=bool(how & _CREATE),
            exclusive=bool(how & _EXCLUSIVE),
            directory=bool(how & _OPEN_DIRECTORY),
        )
        if node.is_directory and rights & _WRITE_RIGHT and not how & _OPEN_DIRECTORY:
            raise FileError(Errno.ISDIR)
        if how & _TRUNCATE and not node.is_directory:
            self._files.resize(node, 0)
        self._files.opened(node)
        self._open[number] = OpenFile(node, rights & _ALL_RIGHTS, flags & 31)
        self.memory.pack(result, "<I", number)

    def path_filestat_get(self, fd: int, _lookup: int, address: int, size: int, result: int) -> None:
        self._status(self._files.find(self._file(fd).node, self.memory.text(address, size)), result)

    def path_filestat_set_times(
        self, fd: int, _lookup: int, address: int, size: int, accessed: int, modified: int, flags: int
    ) -> None:
        node = self._files.find(self._file(fd).node, self.memory.text(address, size))
        _set_times(node, accessed, modified, flags)

    def path_create_directory(self, fd: int, address: int, size: int) -> None:
        self._files.make_directory(self._file(fd).node, self.memory.text(address, size))

    def path_remove_directory(self, fd: int, address: int, size: int) -> None:
        self._files.remove(self._file(fd).node, self.memory.text(address, size), directory=True)

    def path_unlink_file(self, fd: int, address: int, size: int) -> None:
        self._files.remove(self._file(fd).node, self.memory.text(address, size), directory=False)

    def path_rename(
        self, fd: int, address: int, size: int, new_fd: int, new_address: int, new_size: int
    ) -> None:
        old, new = self.memory.text(address, size), self.memory.text(new_address, new_size)
        self._files.rename(self._file(fd).node, old, self._file(new_fd).node, new)

    def path_link(self, *_values: int) -> None:
        raise FileError(Errno.NOTSUP)

    def path_symlink(self, *_values: int) -> None:
        raise FileError(Errno.NOTSUP)

    def path_readlink(self, fd: int, address: int, size: int, *_result: int) -> None:
        self._files.find(self._file(fd).node, self.memory.text(address, size))
        raise FileError(Errno.INVAL)  # there are no links


def _kind(node: Node) -> int:
    return _DIRECTORY if node.is_directory else _FILE


def _set_times(node: Node, accessed: int, modified: int, flags: int) -> None:
    if flags & 3:
        node.accessed = time.time_ns() if flags & 2 else accessed & U64
    if flags & 12:
        node.modified = time.time_ns() if flags & 8 else modified & U64
