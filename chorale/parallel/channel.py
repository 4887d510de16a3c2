"""Channel: one end of the socket pair between the engine process and a rank."""

from __future__ import annotations

import select
import threading
from multiprocessing.connection import Connection


class Channel:
    """Sends and receives complete messages. Any thread may send; one receives."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self._lock = threading.Lock()

    def send(self, data: bytes) -> None:
        """Raises ``OSError`` if the other end is gone."""
        with self._lock:
            self.connection.send_bytes(data)

    def receive(self) -> bytes | None:
        """Wait for the next message. Returns None if the other end is gone."""
        try:
            return self.connection.recv_bytes()
        except (EOFError, OSError):
            return None

    def has_message(self, within: float) -> bool:
        """Wait at most ``within`` seconds for a message to arrive, and return whether one has."""
        return bool(select.select([self.connection], [], [], within)[0])

    def close(self) -> None:
        with self._lock:
            self.connection.close()
