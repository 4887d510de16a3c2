"""Channel: one end of the socket pair between the engine process and a rank."""

from __future__ import annotations

import select
import socket
import struct
import threading

_LENGTH = struct.Struct("<I")
_PIECE = 1 << 20


class Channel:
    """Sends and receives complete messages. Any thread may send; one receives."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._lock = threading.Lock()
        self._received = bytearray()

    def send(self, data: bytes) -> None:
        """Raises ``OSError`` if the other end is gone."""
        with self._lock:
            self.connection.sendall(_LENGTH.pack(len(data)) + data)

    def receive(self) -> bytes | None:
        """Wait for the next message. Returns None if the other end is gone."""
        while True:
            message = self.take()
            if message is not None:
                return message
            if not self.fill():
                return None

    def has_message(self, within: float) -> bool:
        """Wait at most ``within`` seconds for a message to arrive. Returns whether the start of one has
        arrived."""
        return bool(self._received) or bool(select.select([self.connection], [], [], within)[0])

    def take(self) -> bytes | None:
        """Return the next message, or None if it has not been read completely."""
        received = self._received
        if len(received) < _LENGTH.size:
            return None
        end = _LENGTH.size + _LENGTH.unpack_from(received)[0]
        if len(received) < end:
            return None
        message = bytes(received[_LENGTH.size : end])
        del received[:end]
        return message

    def fill(self) -> bool:
        """Wait for data and read it. Returns False if the other end is gone."""
        try:
            data = self.connection.recv(_PIECE)
        except OSError:
            return False
        self._received += data
        return bool(data)

    def close(self) -> None:
        """End the connection for both ends, and for threads that are sending or receiving."""
        try:
            self.connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # it has ended already
        self.connection.close()
