"""The sockets that a server listens on, and the signals that end it.

The supervisor needs only this module before it starts the engine; it imports the server while that loads.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import signal
import socket
import stat
from pathlib import Path

from chorale.config.engine import ServerConfig
from chorale.errors import ConfigError

BACKLOG = 2048


class Stop:
    """Asks a running server to end. Used by signals, tests and the supervisor."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.hurry = asyncio.Event()

    def __call__(self) -> None:
        """Requests the drain; a second call cancels running requests."""
        (self.hurry if self.asked.is_set() else self.asked).set()


def bind_sockets(config: ServerConfig) -> list[socket.socket]:
    """Returns the listening sockets. Call it before the model is loaded, to detect a port in use early.

    Raises ``ConfigError`` if the address cannot be used.
    """
    if config.uds is not None:
        return [_bind_unix(Path(config.uds))]
    try:
        found = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except socket.gaierror as error:
        raise ConfigError(f"--host {config.host}: {error.strerror}") from None
    sockets: list[socket.socket] = []
    absent: OSError | None = None
    for family, _, _, _, address in found:
        try:
            # An IPv6 socket takes no IPv4 connections: another socket does.
            sockets.append(socket.create_server(address, family=family, backlog=BACKLOG))
        except OSError as error:
            absent = error
            # A name may have addresses of a family that this machine lacks; one working address is enough.
            if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                sockets = _close(sockets)
                break
    if not sockets:
        raise _cannot_listen(config, absent)
    return sockets


def _close(sockets: list[socket.socket]) -> list[socket.socket]:
    for bound in sockets:
        bound.close()
    return []


def _cannot_listen(config: ServerConfig, error: OSError | None) -> ConfigError:
    if error is not None and error.errno == errno.EADDRINUSE:
        return ConfigError(
            f"port {config.port} of {config.host} is in use; stop the server that uses it, or choose another "
            f"port: {os.environ.get('CHORALE_PORT_HINT') or '--port 9000'}"
        )
    reason = os.strerror(error.errno or 0) if error is not None else "the name has no address"
    return ConfigError(f"cannot listen on {config.host}:{config.port}: {reason}")


def _bind_unix(path: Path) -> socket.socket:
    """Creates a socket file that only its owner can use. Replaces a file on which no server listens."""
    try:
        _remove_stale_socket(path)
        bound = socket.socket(socket.AF_UNIX)
        try:
            bound.bind(str(path))
            path.chmod(0o600)
            bound.listen(BACKLOG)
        except OSError:
            bound.close()
            raise
    except OSError as error:
        # Only "path too long" has no strerror.
        reason = error.strerror or f"{error}; choose a shorter one (Linux allows 107 bytes)"
        if isinstance(error, (FileNotFoundError, NotADirectoryError)):
            reason += f"; create the folder {path.parent}, or choose another path"
        raise ConfigError(f"--uds {path}: {reason}") from None
    bound.setblocking(False)
    return bound


def _remove_stale_socket(path: Path) -> None:
    """Removes a socket file on which no server listens. Raises ``ConfigError`` for any other file."""
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISSOCK(path.stat().st_mode):
            raise ConfigError(f"--uds {path}: exists and is not a socket; choose another path")
        with socket.socket(socket.AF_UNIX) as probe:
            try:
                probe.connect(str(path))
            except OSError:
                path.unlink()
            else:
                raise ConfigError(f"--uds {path}: another server listens there; choose another path")


def stop_signals() -> tuple[signal.Signals, ...]:
    """Returns the signals that start the drain; a second signal cancels running requests.

    SIGHUP (the terminal was closed) and SIGQUIT are included unless they are ignored, as under ``nohup``.
    """
    others = (signal.SIGHUP, signal.SIGQUIT)
    used = (name for name in others if signal.getsignal(name) is not signal.SIG_IGN)
    return (signal.SIGTERM, signal.SIGINT, *used)
