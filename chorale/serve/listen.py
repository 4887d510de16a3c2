"""The listening sockets: bound once by the supervisor, before anything loads; shared by API processes."""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path

from chorale.config import ServerConfig
from chorale.errors import ConfigError

BACKLOG = 2048
UDS_MODE = 0o660


def listen(config: ServerConfig) -> list[socket.socket]:
    """Raises ``ConfigError`` when the address cannot be had; says which."""
    if config.uds is not None:
        return [_listen_unix(Path(config.uds))]
    return [_listen_tcp(config.host, config.port)]


def url(config: ServerConfig, sockets: list[socket.socket]) -> str:
    """Where clients find the server, with the port that was really bound."""
    if config.uds is not None:
        return f"unix:{config.uds}"
    host, port = sockets[0].getsockname()[:2]
    scheme = "https" if config.ssl_certfile else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def _listen_tcp(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}:{port}: {error}") from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        return _ready(listener)
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror or error}") from error


def _listen_unix(path: Path) -> socket.socket:
    _remove_stale(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(str(path))
        os.chmod(path, UDS_MODE)
        return _ready(listener)
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot listen on {path}: {error.strerror or error}") from error


def _remove_stale(path: Path) -> None:
    """Remove a socket that nobody answers; never a file of another kind."""
    if not path.exists() or not stat.S_ISSOCK(path.stat().st_mode):
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            path.unlink(missing_ok=True)


def _ready(listener: socket.socket) -> socket.socket:
    listener.listen(BACKLOG)
    listener.setblocking(False)
    return listener
