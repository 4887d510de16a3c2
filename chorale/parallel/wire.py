"""The messages between the engine process and its ranks: plans as numbers, never tensors.

A message is msgpack behind four bytes of length, on a socket pair. The engine process encodes a plan once for
all ranks.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
import numpy as np

from chorale.engine.types import HostLoad, IntArray, RowStart, SamplingSpec, StepPlan, Transfers

_MASK64 = 2**64 - 1  # of seeds: all that sampling uses of them
_COLUMNS = (
    *("rows", "num_computed", "num_new", "token_ids"),
    *("append_row", "append_group", "append_index", "append_block"),
)
_NONE: IntArray = np.zeros(0, np.int32)
_OPTIONAL = ("num_drafts", "makes", "following")


# ------------------------------------------------------------------ to the ranks


class Machine(msgspec.Struct, frozen=True, tag="machine"):
    """Memory that every rank has at least, bytes: all ranks size their pools by it. It is that of the device
    ``place`` (``Hardware``)."""

    total_bytes: int
    free_bytes: int
    place: str = ""
    uuid: str = ""
    free_of_ranks: tuple[int, ...] = ()


class Start(msgspec.Struct, frozen=True, array_like=True):
    """A ``RowStart``."""

    row: int
    token_ids: bytes
    num_prompt_tokens: int
    sampling: SamplingSpec
    seed: int
    eos_token_ids: tuple[int, ...]


class Load(msgspec.Struct, frozen=True, array_like=True):
    """A ``HostLoad``."""

    load_id: int
    slots: bytes
    blocks: bytes
    saved_slots: bytes
    saved_blocks: bytes


class PageCopies(msgspec.Struct, frozen=True, array_like=True):
    """A ``Transfers``."""

    saved_slots: bytes
    saved_blocks: bytes
    loads: list[Load]
    finished: tuple[int, ...]


class Plan(msgspec.Struct, frozen=True, tag="plan"):
    """A ``StepPlan``: its int32 arrays in a row."""

    step_id: int
    starts: list[Start]
    lengths: tuple[int, ...]
    numbers: bytes
    samples: bytes
    prompt_logprob_rows: list[int]
    num_made: int
    transfers: PageCopies | None = None


class WorkerCall(msgspec.Struct, frozen=True, tag="call"):
    """Something that every rank's worker prepares before a step needs it."""

    method: Literal["capture_decode", "capture_verify", "try_size"]
    arguments: dict[str, int | bool]

    def __call__(self, worker: Any) -> None:
        getattr(worker, self.method)(**self.arguments)


class Grammar(msgspec.Struct, frozen=True, tag="grammar"):
    """A grammar that rows will soon need compiled."""

    text: str


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """The engine ends."""


# ------------------------------------------------------------------ from the ranks


class Opened(msgspec.Struct, frozen=True, tag="opened"):
    """A rank has opened its device. ``kind``: as of ``Hardware``."""

    device: str
    kind: str
    total_bytes: int
    free_bytes: int
    place: str = ""
    uuid: str = ""


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """A rank takes plans."""


class Beat(msgspec.Struct, frozen=True, tag="beat"):
    """A rank lives. ``busy``: seconds that its own part of the current step has taken, 0 while it waits."""

    busy: float = 0.0


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The reason why a rank ends. ``exchange``: another rank is probably the cause. ``gpu``: its hardware
    failed."""

    message: str
    reason: Literal["config", "exchange", "gpu", "other"]


ToRank = Machine | Plan | WorkerCall | Grammar | Stop
FromRank = Opened | Ready | Beat | Failed
_TO_RANK: msgspec.msgpack.Decoder[ToRank] = msgspec.msgpack.Decoder(ToRank)
_FROM_RANK: msgspec.msgpack.Decoder[FromRank] = msgspec.msgpack.Decoder(FromRank)
_ENCODER = msgspec.msgpack.Encoder()


def encode(message: ToRank | FromRank) -> bytes:
    return _ENCODER.encode(message)


def decode_to_rank(data: bytes) -> ToRank:
    return _TO_RANK.decode(data)


def decode_from_rank(data: bytes) -> FromRank:
    return _FROM_RANK.decode(data)


# ------------------------------------------------------------------ plans


def pack_plan(plan: StepPlan) -> Plan:
    columns = [getattr(plan, name) for name in _COLUMNS]
    optional = (getattr(plan, name) for name in _OPTIONAL)
    columns += [_NONE if column is None else column for column in optional]
    return Plan(
        step_id=plan.step_id,
        starts=[_pack_start(start) for start in plan.starts],
        lengths=tuple(map(len, columns)),
        numbers=np.concatenate(columns, dtype=np.int32).tobytes(),
        samples=plan.samples.tobytes(),
        prompt_logprob_rows=list(plan.prompt_logprob_rows),
        num_made=plan.num_made,
        transfers=None if plan.transfers is None else _pack_transfers(plan.transfers),
    )


def unpack_plan(message: Plan) -> StepPlan:
    """Inverse of ``pack_plan``; the arrays can be written to, as the engine's own."""
    numbers = np.frombuffer(message.numbers, np.int32).copy()
    columns = np.split(numbers, np.cumsum(message.lengths)[:-1])
    arrays: dict[str, IntArray] = dict(zip(_COLUMNS, columns[: len(_COLUMNS)], strict=True))
    num_drafts, makes, following = (column if len(column) else None for column in columns[len(_COLUMNS) :])
    return StepPlan(
        step_id=message.step_id,
        starts=tuple(_unpack_start(start) for start in message.starts),
        samples=np.frombuffer(message.samples, np.bool_).copy(),
        prompt_logprob_rows=frozenset(message.prompt_logprob_rows),
        num_drafts=num_drafts,
        num_made=message.num_made,
        makes=None if makes is None else makes.astype(np.bool_),
        following=following,
        transfers=None if message.transfers is None else _unpack_transfers(message.transfers),
        **arrays,
    )


def _pack_transfers(transfers: Transfers) -> PageCopies:
    loads = [
        Load(
            load.load_id,
            load.slots.tobytes(),
            load.blocks.tobytes(),
            load.saved_slots.tobytes(),
            load.saved_blocks.tobytes(),
        )
        for load in transfers.loads
    ]
    saved = (transfers.saved_slots.tobytes(), transfers.saved_blocks.tobytes())
    return PageCopies(*saved, loads, transfers.finished)


def _unpack_transfers(message: PageCopies) -> Transfers:
    loads = tuple(
        HostLoad(
            load.load_id,
            _ids(load.slots),
            _ids(load.blocks),
            _ids(load.saved_slots),
            _ids(load.saved_blocks),
        )
        for load in message.loads
    )
    return Transfers(_ids(message.saved_slots), _ids(message.saved_blocks), loads, message.finished)


def _ids(data: bytes) -> IntArray:
    return np.frombuffer(data, np.int32).copy()


def _pack_start(start: RowStart) -> Start:
    return Start(
        row=start.row,
        token_ids=start.token_ids.tobytes(),
        num_prompt_tokens=start.num_prompt_tokens,
        sampling=msgspec.structs.replace(start.sampling, seed=None),  # ``seed`` is the resolved one
        seed=start.seed & _MASK64,
        eos_token_ids=start.eos_token_ids,
    )


def _unpack_start(start: Start) -> RowStart:
    return RowStart(
        row=start.row,
        token_ids=np.frombuffer(start.token_ids, np.int32).copy(),
        num_prompt_tokens=start.num_prompt_tokens,
        sampling=start.sampling,
        seed=start.seed,
        eos_token_ids=start.eos_token_ids,
    )
