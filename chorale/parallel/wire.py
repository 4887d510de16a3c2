"""The messages between the engine process and its ranks: plans as numbers, never tensors. A message is four
bytes of length followed by msgpack, on a socket pair. The engine process encodes a plan once for all ranks.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Literal, get_args

import msgspec
import numpy as np

from chorale.engine.commands import Command
from chorale.engine.types import AdapterRef, BoolArray, IntArray, StepPlan
from chorale.machine.hardware import Hardware

# ------------------------------------------------------------------ to the ranks


class Machine(msgspec.Struct, frozen=True, tag="machine"):
    """The device of the rank with the least free memory, by which all ranks size their pools.
    ``free_of_ranks``: free bytes of each rank."""

    hardware: Hardware
    free_of_ranks: tuple[int, ...] = ()


class Plan(msgspec.Struct, frozen=True, tag="plan"):
    """A step that every rank runs."""

    step: StepPlan


class WorkerCall(msgspec.Struct, frozen=True, tag="call"):
    """A call of every rank's worker that prepares something before a step needs it."""

    method: Literal["capture_decode", "capture_verify", "try_size"]
    arguments: dict[str, int | bool]

    def __call__(self, worker: Any) -> None:
        getattr(worker, self.method)(**self.arguments)


class Grammar(msgspec.Struct, frozen=True, tag="grammar"):
    """A grammar to compile before rows need it."""

    text: str


class Administer(msgspec.Struct, frozen=True, tag="administer"):
    """A command for the rank's device (``LocalExecutor.control``), which a ``Ready`` answers."""

    command: Command


class Adapt(msgspec.Struct, frozen=True, tag="adapt"):
    """A call of the rank's ``AdapterService``. ``Adapted`` answers ``load`` and ``place``, in their order."""

    call: Literal["load", "place", "forget"]
    adapter: AdapterRef
    slot: int = -1


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """The engine ends."""


# ------------------------------------------------------------------ from the ranks


class Opened(msgspec.Struct, frozen=True, tag="opened"):
    """A rank has opened its device."""

    hardware: Hardware


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """A rank is ready for plans, after its start or a command. ``refusal``: why the command had no effect."""

    refusal: str = ""


class Adapted(msgspec.Struct, frozen=True, tag="adapted"):
    """A call of ``Adapt`` has ended. ``fault``: why an adapter cannot be used."""

    fault: str = ""


class Beat(msgspec.Struct, frozen=True, tag="beat"):
    """A rank's heartbeat. ``busy``: seconds that its part of the current step has taken, 0 while it waits."""

    busy: float = 0.0


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The reason why a rank ends. ``exchange``: another rank is probably the cause. ``gpu``: its hardware
    failed."""

    message: str
    reason: Literal["config", "exchange", "gpu", "other"]


ToRank = Machine | Plan | WorkerCall | Grammar | Administer | Adapt | Stop
FromRank = Opened | Ready | Adapted | Beat | Failed


def _array_bytes(value: object) -> bytes:
    if isinstance(value, np.ndarray):
        return value.tobytes()
    raise NotImplementedError(type(value))


def _array(kind: object, data: bytes) -> IntArray | BoolArray:
    """Returns a writable array, like those of the engine."""
    return np.frombuffer(data, _scalar(kind)).copy()


@lru_cache
def _scalar(kind: object) -> type[np.generic]:
    """Returns the scalar type of ndarray[shape, dtype[scalar]]. Cached: each step has a dozen arrays."""
    (scalar,) = get_args(get_args(kind)[1])
    return scalar  # type: ignore[no-any-return]


_TO_RANK: msgspec.msgpack.Decoder[ToRank] = msgspec.msgpack.Decoder(ToRank, dec_hook=_array)
_FROM_RANK: msgspec.msgpack.Decoder[FromRank] = msgspec.msgpack.Decoder(FromRank)
_ENCODER = msgspec.msgpack.Encoder(enc_hook=_array_bytes)


def encode(message: ToRank | FromRank) -> bytes:
    return _ENCODER.encode(message)


def decode_to_rank(data: bytes) -> ToRank:
    return _TO_RANK.decode(data)


def decode_from_rank(data: bytes) -> FromRank:
    return _FROM_RANK.decode(data)
