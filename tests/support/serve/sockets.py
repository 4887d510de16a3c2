"""Folders for sockets, whose paths must be short, while TMPDIR may be long."""

from __future__ import annotations

import tempfile

from chorale.machine.folders import Folder, folder_for_sockets


def socket_folder() -> Folder:
    found = folder_for_sockets((tempfile.gettempdir(), "/tmp"), "a-name-of-20-letters")
    assert found is not None, "/tmp cannot be written"
    return found
