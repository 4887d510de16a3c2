"""An in-memory file system with limits on bytes and entries. It has no links and no access to the host."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

MAX_NAME_BYTES = 255
MAX_PATH_BYTES = 4096
MAX_NODES = 8192


class Errno:
    """Error numbers of WASI preview 1."""

    BADF, EXIST, FAULT, INVAL, IO, ISDIR, MFILE = 8, 20, 21, 28, 29, 31, 33
    NAMETOOLONG, NOENT, NOSPC, NOTDIR, NOTEMPTY, NOTSOCK = 37, 44, 51, 54, 55, 57
    NOTSUP, ROFS, SPIPE = 58, 69, 70


class FileError(Exception):
    """A failed call, with a number of ``Errno``."""

    def __init__(self, errno: int) -> None:
        super().__init__(errno)
        self.errno = errno


@dataclass(slots=True, eq=False)
class Node:
    """A file if ``data`` is set, else a directory. Times are in nanoseconds."""

    number: int
    data: bytearray | None = None
    children: dict[str, Node] = field(default_factory=dict)
    writable: bool = True
    num_open: int = 0
    linked: bool = True
    accessed: int = 0
    modified: int = 0

    @property
    def is_directory(self) -> bool:
        return self.data is None

    @property
    def size(self) -> int:
        return len(self.data) if self.data is not None else 0


class Files:
    """The file system. ``max_bytes`` limits the contents of all files together."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._num_nodes = 0
        self._next_number = 1
        self.root = self._node(None)
        mount = self._add(self.root, "mnt", None)
        self._add(mount, "data", None)
        self._add(self.root, "tmp", None)
        self.root.writable = mount.writable = False

    def _node(self, data: bytearray | None) -> Node:
        if self._num_nodes >= MAX_NODES:
            raise FileError(Errno.NOSPC)
        now = time.time_ns()
        node = Node(self._next_number, data, accessed=now, modified=now)
        self._num_nodes += 1
        self._next_number += 1
        return node

    def _add(self, parent: Node, name: str, data: bytearray | None) -> Node:
        if not parent.writable:
            raise FileError(Errno.ROFS)
        node = parent.children[name] = self._node(data)
        parent.modified = node.modified
        return node

    def _unlink(self, parent: Node, name: str) -> None:
        node = parent.children.pop(name)
        parent.modified = time.time_ns()
        node.linked = False
        self._free(node)

    def _free(self, node: Node) -> None:
        """Frees a file. A removed file keeps its bytes until it is closed."""
        if node.linked or node.num_open:
            return
        self.num_bytes -= node.size
        self._num_nodes -= 1
        if node.data is not None:
            node.data = bytearray()

    def opened(self, node: Node) -> None:
        node.num_open += 1

    def closed(self, node: Node) -> None:
        node.num_open -= 1
        self._free(node)

    # ------------------------------------------------------------------ paths

    def _locate(self, start: Node, path: str) -> tuple[Node, str]:
        """Returns the directory of the path's last part, and that part ("" for the start itself)."""
        if len(path.encode()) > MAX_PATH_BYTES:
            raise FileError(Errno.NAMETOOLONG)
        above: list[Node] = []
        current, last = start, ""
        for part in path.split("/"):
            if part in ("", "."):
                continue
            if len(part.encode()) > MAX_NAME_BYTES:
                raise FileError(Errno.NAMETOOLONG)
            if last:
                above.append(current)
                current = self._child(current, last)
                last = ""
            if not current.is_directory:
                raise FileError(Errno.NOTDIR)
            if part == "..":
                current = above.pop() if above else start  # a path cannot leave the start directory
            else:
                last = part
        return current, last

    def _child(self, parent: Node, name: str) -> Node:
        if not parent.is_directory:
            raise FileError(Errno.NOTDIR)
        if name not in parent.children:
            raise FileError(Errno.NOENT)
        return parent.children[name]

    def find(self, start: Node, path: str) -> Node:
        parent, name = self._locate(start, path)
        found = self._child(parent, name) if name else parent
        if path.endswith("/") and not found.is_directory:
            raise FileError(Errno.NOTDIR)
        return found

    def open(self, start: Node, path: str, *, create: bool, exclusive: bool, directory: bool) -> Node:
        parent, name = self._locate(start, path)
        if not name:
            return parent
        found = parent.children.get(name) if parent.is_directory else None
        if found is None:
            if not create or directory or path.endswith("/"):
                raise FileError(Errno.NOENT if parent.is_directory else Errno.NOTDIR)
            return self._add(parent, name, bytearray())
        if exclusive and create:
            raise FileError(Errno.EXIST)
        if (directory or path.endswith("/")) and not found.is_directory:
            raise FileError(Errno.NOTDIR)
        return found

    def make_directory(self, start: Node, path: str) -> None:
        parent, name = self._locate(start, path)
        if not name or name in parent.children:
            raise FileError(Errno.EXIST)
        if not parent.is_directory:
            raise FileError(Errno.NOTDIR)
        self._add(parent, name, None)

    def remove(self, start: Node, path: str, *, directory: bool) -> None:
        parent, name = self._locate(start, path)
        if not name:
            raise FileError(Errno.INVAL)
        node = self._child(parent, name)
        if not parent.writable:
            raise FileError(Errno.ROFS)
        if directory != node.is_directory:
            raise FileError(Errno.NOTDIR if directory else Errno.ISDIR)
        if node.children:
            raise FileError(Errno.NOTEMPTY)
        self._unlink(parent, name)

    def rename(self, start: Node, path: str, new_start: Node, new_path: str) -> None:
        parent, name = self._locate(start, path)
        new_parent, new_name = self._locate(new_start, new_path)
        if not name or not new_name:
            raise FileError(Errno.INVAL)
        node = self._child(parent, name)
        if not new_parent.is_directory:
            raise FileError(Errno.NOTDIR)
        if not parent.writable or not new_parent.writable:
            raise FileError(Errno.ROFS)
        if self._is_below(new_parent, node):
            raise FileError(Errno.INVAL)
        old = new_parent.children.get(new_name)
        if old is node:
            return
        if old is not None:
            if old.is_directory != node.is_directory:
                raise FileError(Errno.ISDIR if old.is_directory else Errno.NOTDIR)
            if old.children:
                raise FileError(Errno.NOTEMPTY)
            self._unlink(new_parent, new_name)
        del parent.children[name]
        new_parent.children[new_name] = node

    def _is_below(self, node: Node, top: Node) -> bool:
        waiting = [top]
        while waiting:
            current = waiting.pop()
            if current is node:
                return True
            waiting += current.children.values()
        return False

    # ------------------------------------------------------------------ contents

    def resize(self, node: Node, size: int) -> None:
        data = self._data(node)
        growth = size - len(data)
        if self.num_bytes + growth > self.max_bytes:
            raise FileError(Errno.NOSPC)
        if growth > 0:
            data.extend(bytes(growth))
        else:
            del data[size:]
        self.num_bytes += growth
        node.modified = time.time_ns()

    def write(self, node: Node, offset: int, piece: bytes) -> int:
        """Writes as much as there is room for. Raises ``FileError`` if there is none."""
        data = self._data(node)
        room = self.max_bytes - self.num_bytes + len(data) - offset
        piece = piece[: max(0, room)] if piece else piece
        if not piece and room <= 0:
            raise FileError(Errno.NOSPC)
        end = offset + len(piece)
        if end > len(data):
            self.resize(node, end)
        data[offset:end] = piece
        node.modified = time.time_ns()
        return len(piece)

    def read(self, node: Node, offset: int, size: int) -> bytes:
        node.accessed = time.time_ns()
        return bytes(self._data(node)[offset : offset + size])

    def _data(self, node: Node) -> bytearray:
        if node.data is None:
            raise FileError(Errno.ISDIR)
        return node.data
