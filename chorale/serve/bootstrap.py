"""Configuration of the server's child processes, which end with their parent.

The configuration is sent as msgpack on standard input. It is never in argv, which every user of the machine
can read. Sockets are in a directory with mode 0700, so no other user can connect.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import secrets
import socket
import stat
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import BinaryIO, TypeVar

import msgspec

from chorale.client.wire.curve import TcpSocket
from chorale.client.wire.messages import DECODE_ERRORS, EngineAddress, local_address
from chorale.config.engine import EngineConfig, ServerConfig
from chorale.engine.kv_cache.hashing import shared_secret
from chorale.errors import ConfigError
from chorale.machine.devices import replica_environments
from chorale.machine.folders import Folder, folder_for_sockets, write_whole
from chorale.machine.processes import HEARTBEAT_TIMEOUT, die_with_parent
from chorale.serve.logs import LogOptions

# Exit codes, from sysexits.h if it defines one.
EXIT_OK = 0
EXIT_FAILED = 1  # gave up after repeated crashes, or the HTTP server failed
EXIT_CONFIG = 2  # invalid configuration; a restart would not help
# Variables that are removed from the environment of every child process.
SECRET_VARIABLES = ("CHORALE_API_KEY", "VLLM_API_KEY", "CHORALE_PREFIX_SECRET")
# API keys of search services. Only the HTTP processes inherit them.
TOOL_KEY_VARIABLES = (
    "EXA_API_KEY",
    "YDC_API_KEY",
    "BRAVE_API_KEY",
    "TAVILY_API_KEY",
    "CHORALE_TOOLS_API_KEY",
)

FAILURE_FILE = "failure"


class EngineTcp(msgspec.Struct, frozen=True, kw_only=True):
    """The listening TCP sockets of an engine, and the public key that clients need."""

    engine: TcpSocket
    beats: TcpSocket
    public_key: str


class ChildStart(msgspec.Struct, frozen=True, kw_only=True):
    """The part of the configuration that all child processes have."""

    parent_pid: int
    log: LogOptions = LogOptions()


class EngineStart(ChildStart, frozen=True, kw_only=True):
    """The engine process's configuration, from stdin. Times are seconds."""

    directory: str  # existing directory for the sockets, with mode 0700
    config: EngineConfig
    name: str = "engine"  # name in log lines; replicas are engine-0, engine-1, ...
    replica: int = 0  # index of this replica
    restarts: int = 0  # earlier processes of this engine
    environment: dict[str, str] = {}  # added environment variables, which select this engine's devices
    prefix_secret: bytes = b""  # key of the prefix hashes, the same for all replicas; random if empty
    heartbeat_interval: float = 0.2
    client_timeout: float = 10.0  # requests of a client that is silent for this long are aborted
    tcp: EngineTcp | None = None  # sockets for clients on other machines

    @property
    def address(self) -> EngineAddress:
        """Returns the endpoints for clients on this machine."""
        return local_address(self.directory, self.tcp.public_key if self.tcp is not None else "")

    @property
    def inherited(self) -> tuple[int, ...]:
        """Returns the file descriptors that the engine process inherits."""
        return () if self.tcp is None else (self.tcp.engine.fd, self.tcp.beats.fd)


class ApiStart(ChildStart, frozen=True, kw_only=True):
    """An API process's configuration, from stdin. ``socket_fds`` are inherited listening sockets."""

    directory: str
    server: ServerConfig
    model: str
    engine_directories: tuple[str, ...] = ()  # one per replica; empty for one engine, in ``directory``
    seed: int = 0  # with several engines: the source of seeds for requests without one
    api_key_hashes: tuple[bytes, ...]
    socket_fds: tuple[int, ...]
    process: int = 0  # index of this API process
    beats: int = -1  # file descriptor of a pipe to which its event loop writes heartbeats, one byte each
    heartbeat_timeout: float = 2 * HEARTBEAT_TIMEOUT  # seconds of silence after which it counts as hung


class Failure(msgspec.Struct, frozen=True):
    """The reason why an engine process ended, which it writes to a file for the supervisor."""

    message: str
    deterministic: bool  # a restart would fail again
    is_gpu: bool = False  # the hardware of the GPU failed, so a restart may fail again


StartT = TypeVar("StartT", bound=ChildStart)


def read_start(stream: BinaryIO, type_: type[StartT]) -> StartT:
    """Reads the configuration, and makes this process end when its parent ends.

    Raises ``msgspec.DecodeError`` if the message is not a ``type_``.
    """
    start = msgspec.msgpack.decode(stream.read(), type=type_)
    die_with_parent(start.parent_pid)
    return start


def configured_secret(config: EngineConfig, environment: Mapping[str, str]) -> bytes:
    """Returns the key of the prefix hashes if others must know it; otherwise b"", for a random key."""
    events = config.kv_events_config
    if (events is not None and events.is_on) or environment.get("CHORALE_PREFIX_SECRET"):
        return shared_secret(environment)
    return b""


def replicate(start: EngineStart, count: int) -> tuple[EngineStart, ...]:
    """Returns the configuration of each replica, and creates the directories for their sockets.

    Each replica gets its own GPUs. On a CPU, replicas share its cores and memory. Raises ``ConfigError`` if
    there are too few GPUs.
    """
    environments = None
    if count > 1 or start.config.device_ids:
        environments = replica_environments(start.config, count)
    if count == 1:
        return (msgspec.structs.replace(start, environment=environments[0]) if environments else start,)
    config = start.config if environments else dataclasses.replace(start.config, host_share=count)
    secret, made = start.prefix_secret or secrets.token_bytes(16), []
    for index in range(count):
        directory = Path(start.directory, str(index))
        directory.mkdir(mode=0o700)
        replica = msgspec.structs.replace(
            start,
            directory=str(directory),
            config=config,
            name=f"engine-{index}",
            replica=index,
            environment=environments[index] if environments else {},
            prefix_secret=secret,
        )
        made.append(replica)
    return tuple(made)


def make_directory() -> Folder:
    """Creates a private directory for the sockets, whose paths have a length limit.

    Removes the directories of killed servers. Raises ``ConfigError`` if no location is suitable.
    """
    parents = (os.environ.get("XDG_RUNTIME_DIR"), tempfile.gettempdir(), "/tmp")
    folder = folder_for_sockets(parents, "000/engine")  # each replica has a subfolder
    if folder is not None:
        return folder
    raise ConfigError("no directory for the engine's sockets: set TMPDIR to a short, writable path")


def check_directory(directory: str | Path) -> None:
    """Raises ``ConfigError`` if another user could reach sockets in ``directory``."""
    status = os.stat(directory)
    if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) != 0o700:
        raise ConfigError(f"{directory} must belong to this user and have mode 0700")


def write_failure(directory: str | Path, failure: Failure) -> None:
    write_whole(Path(directory) / FAILURE_FILE, msgspec.msgpack.encode(failure))


def take_failure(directory: str | Path) -> Failure | None:
    """Returns the failure that the last engine process has written, or None, and removes its file."""
    path = Path(directory) / FAILURE_FILE
    try:
        data = path.read_bytes()
        path.unlink()
        return msgspec.msgpack.decode(data, type=Failure)
    except (FileNotFoundError, *DECODE_ERRORS):
        return None


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Returns uvloop's loop factory if it is installed, else None for asyncio's."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


def inherited_sockets(fds: tuple[int, ...]) -> list[socket.socket]:
    """Returns the listening sockets of inherited descriptors. Their family and type are detected."""
    return [socket.socket(fileno=fd) for fd in fds]
