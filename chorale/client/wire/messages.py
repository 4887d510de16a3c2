"""The messages between API processes and the engine process, and the addresses of their sockets.

Two unix sockets in one private directory (mode 0700):

* ``engine``: each client's DEALER to the engine's ROUTER. Clients send requests; for each step, the engine
  sends each client one ``StepMessage`` with that client's chunks only. A client that follows the engine
  (``FollowBlocks``) also gets a ``PrefixSnapshot``, and from then on the changes of each step, before the
  chunks of that step.
* ``beats``: the engine's PUB, driven by a separate thread. A ``Heartbeat`` is self-contained (state,
  progress, info, stats, how long the current step has been running), so a late subscriber needs no replay.

Messages are msgpack of typed structs. A message that cannot be decoded is dropped.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from chorale.client.base import EngineInfo, EngineStatus
from chorale.engine.commands import Command, Outcome
from chorale.engine.types import (
    BlockChanges,
    EngineStats,
    GenerateRequest,
    PrefixIndexState,
    StepOutputs,
)
from chorale.errors import ConfigError
from chorale.machine.folders import MAX_SOCKET_PATH_BYTES
from chorale.machine.processes import HEARTBEAT_TIMEOUT

# --------------------------------------------------------------------------- client -> engine


class Register(msgspec.Struct, frozen=True, array_like=True, tag="register"):
    """First message of a connection."""


class Submit(msgspec.Struct, frozen=True, array_like=True, tag="submit"):
    """A new request. ``engine_id``: the engine process that it is meant for; a later one ignores it."""

    engine_id: str
    request: GenerateRequest


class Abort(msgspec.Struct, frozen=True, array_like=True, tag="abort"):
    request_ids: list[str]
    index: int | None = None  # the choice to abort; None: all choices


class Ping(msgspec.Struct, frozen=True, array_like=True, tag="ping"):
    """Keep-alive. A client that stops sending it gets ``ClientExpired`` and its requests are aborted.

    ``pid``: id of the client's process; 0 if it runs on another machine.
    """

    pid: int = 0


class Unregister(msgspec.Struct, frozen=True, array_like=True, tag="unregister"):
    """The client disconnects; its requests in flight are aborted."""


class FollowBlocks(msgspec.Struct, frozen=True, array_like=True, tag="follow"):
    """Ask for a ``PrefixSnapshot`` and the ``EngineUpdate``s after it."""


class CheckGrammar(msgspec.Struct, frozen=True, array_like=True, tag="check_grammar"):
    """Ask for a ``GrammarChecked`` of the same ``number``."""

    number: int
    grammar: str


class Control(msgspec.Struct, frozen=True, array_like=True, tag="control"):
    """Ask for a ``Controlled`` of the same ``number``. ``engine_id``: as in ``Submit``."""

    engine_id: str
    number: int
    command: Command


ToEngine = Register | Submit | Abort | Ping | Unregister | FollowBlocks | CheckGrammar | Control


# --------------------------------------------------------------------------- engine -> client


class StepMessage(msgspec.Struct, array_like=True, tag="step"):
    """The chunks of one step for one client."""

    engine_id: str
    step: StepOutputs


class EngineFailed(msgspec.Struct, frozen=True, array_like=True, tag="engine_failed"):
    """A step failed; the engine process ends right after this message."""

    engine_id: str
    message: str


class ClientExpired(msgspec.Struct, frozen=True, array_like=True, tag="client_expired"):
    """Sent to a client that was silent for too long. Its requests in flight have been aborted."""

    engine_id: str
    message: str


class PrefixSnapshot(msgspec.Struct, frozen=True, array_like=True, tag="snapshot"):
    """The prefix index of the engine when it read ``FollowBlocks``."""

    engine_id: str
    index: PrefixIndexState
    stats: EngineStats
    num_received: int = 0  # this client's ``Submit``s since its ``FollowBlocks``; included in ``stats``


class EngineUpdate(msgspec.Struct, frozen=True, array_like=True, tag="update"):
    """The changes of a step, for a client that follows the engine."""

    engine_id: str
    stats: EngineStats
    num_received: int
    changes: BlockChanges | None = None


class GrammarChecked(msgspec.Struct, frozen=True, array_like=True, tag="grammar_checked"):
    """``reason``: the reason why the engine cannot use the grammar, or None."""

    engine_id: str
    number: int
    reason: str | None


class Controlled(msgspec.Struct, frozen=True, array_like=True, tag="controlled"):
    """``refusal``: the reason why the command was not executed; otherwise ``outcome`` is set."""

    engine_id: str
    number: int
    stats: EngineStats
    outcome: Outcome | None
    refusal: str = ""


class Refused(msgspec.Struct, frozen=True, array_like=True, tag="refused"):
    """An engine that is paused, or has lost its weights, refuses a request, which may be sent again later."""

    engine_id: str
    request_id: str
    reason: str


FromEngine = (
    StepMessage
    | EngineFailed
    | ClientExpired
    | PrefixSnapshot
    | EngineUpdate
    | GrammarChecked
    | Controlled
    | Refused
)


class Heartbeat(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The engine's whole public state. Sent at every change, and at least every 250 ms.

    The supervisor sends "failed" when it has given up this engine and others still run.
    """

    engine_id: str
    pid: int
    timeout: float = HEARTBEAT_TIMEOUT  # seconds without a heartbeat after which the engine counts as hung
    state: Literal["loading", "ready", "draining", "failed"]
    phase: str = ""
    progress: float | None = None
    message: str = ""
    step_seconds: float = 0.0  # how long the current step has been running; 0 between steps
    p99_step_seconds: float = 0.0  # 99th percentile of the last 1,024 finished steps
    stats: EngineStats = msgspec.field(default_factory=EngineStats)
    info: EngineInfo | None = None  # set once the engine is ready
    restarts: int = 0  # see ``EngineStatus``
    # A long task between steps (``Command.action``): meanwhile, silence is judged as while loading.
    task: str = ""

    @property
    def status(self) -> EngineStatus:
        return EngineStatus(self.state, self.phase, self.progress, self.message, self.restarts)


# Exceptions that decoders raise. For a tag that is not UTF-8, msgspec raises UnicodeDecodeError.
DECODE_ERRORS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)

encode = msgspec.msgpack.Encoder().encode
decode_to_engine = msgspec.msgpack.Decoder(ToEngine).decode
decode_from_engine = msgspec.msgpack.Decoder(FromEngine).decode
decode_heartbeat = msgspec.msgpack.Decoder(Heartbeat).decode


class EngineAddress(msgspec.Struct, frozen=True):
    """The endpoints of an engine's sockets. ``public_key`` is set if they use CurveZMQ (``curve``)."""

    engine: str
    beats: str
    public_key: str = ""


def local_address(directory: str | Path, public_key: str = "") -> EngineAddress:
    """Return the addresses of the unix sockets of an engine on this machine."""
    return EngineAddress(engine_address(directory), heartbeat_address(directory), public_key)


def engine_address(directory: str | Path) -> str:
    """Return the ROUTER's endpoint. Raises ``ConfigError`` if the path is too long for a unix socket."""
    return _address(directory, "engine")


def heartbeat_address(directory: str | Path) -> str:
    """Return the PUB's endpoint. Raises ``ConfigError`` like ``engine_address``."""
    return _address(directory, "beats")


def _address(directory: str | Path, name: str) -> str:
    path = str(Path(directory).absolute() / name)
    if len(path.encode()) >= MAX_SOCKET_PATH_BYTES:
        raise ConfigError(f"the socket path {path} is too long ({MAX_SOCKET_PATH_BYTES} bytes at most)")
    return f"ipc://{path}"
