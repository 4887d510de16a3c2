"""Intent: the last pause or sleep that an engine was told, which its next process takes up after a crash.

A file in the private folder of the engine's sockets. It is written before a pause or sleep begins, and
removed once the engine runs again. So after a crash in between, an engine is rather paused or asleep than
running: it generates nothing and takes no memory that its operator does not expect. Every command may be sent
again.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from chorale.client.base import Core
from chorale.client.wire.messages import DECODE_ERRORS
from chorale.engine.commands import Command
from chorale.machine.folders import write_whole

NAME = "intent"


class Intent:
    """The file in ``directory``."""

    def __init__(self, directory: str | Path) -> None:
        self._path = Path(directory) / NAME

    def read(self) -> Command | None:
        try:
            return msgspec.msgpack.decode(self._path.read_bytes(), type=Command)
        except (FileNotFoundError, *DECODE_ERRORS):
            return None

    def write(self, command: Command | None) -> None:
        if command is None:
            self._path.unlink(missing_ok=True)
        else:
            write_whole(self._path, msgspec.msgpack.encode(command))

    def take_up(self, core: Core) -> None:
        """Pause or put to sleep a new engine like the one before."""
        command = self.read()
        if command is not None:
            core.control(command).result()
