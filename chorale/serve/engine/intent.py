"""Intent: what the next process of an engine takes up after a crash: the last pause or sleep that the engine
was told, and whether its weights were updated. These are lost, and the process refuses requests until they
are sent again, because its own weights are not those that its clients expect.

Files in the private folder of the engine's sockets. That of a pause or sleep is written before it begins, and
removed once the engine runs again. So after a crash in between, an engine is rather paused or asleep than
running: it generates nothing and takes no memory that its operator does not expect. Every command may be sent
again.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from chorale.client.wire.messages import DECODE_ERRORS
from chorale.engine.commands import Command
from chorale.engine.control import WEIGHTS_LOST
from chorale.machine.folders import write_whole

if TYPE_CHECKING:
    from chorale.engine.core import EngineCore

NAME = "intent"
UPDATED = "weights-updated"  # exists if the weights are not those of the start
logger = logging.getLogger(__name__)


class Intent:
    """The files in ``directory``."""

    def __init__(self, directory: str | Path) -> None:
        self._path, self._updated = Path(directory) / NAME, Path(directory) / UPDATED

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

    def note(self, done: Command) -> None:
        """Remember what a command did to the weights."""
        if done.action == "finish_weight_update":
            self._updated.touch()
        elif done.action == "sleep" and done.level == 2:
            self._updated.unlink(missing_ok=True)

    def take_up(self, core: EngineCore) -> None:
        """Pause or put to sleep a new engine like the one before; let it refuse if weights are lost."""
        if self._updated.exists():
            logger.warning(WEIGHTS_LOST)
            core.control(Command(action="lose_weights")).result()
        command = self.read()
        if command is not None:
            core.control(command).result()
