"""The other ranks of an engine process: how they start, and what all agree on before they load."""

from __future__ import annotations

import logging
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from chorale.config.engine import EngineConfig
from chorale.engine.types import GrammarService
from chorale.errors import ChoraleError, EngineError
from chorale.machine.folders import Folder, folder_for_sockets
from chorale.machine.hardware import Hardware
from chorale.machine.links import LinkFinder
from chorale.machine.platforms import PLATFORMS
from chorale.model.config import ModelConfig
from chorale.parallel.communicator import Communicator
from chorale.parallel.distributed import connect
from chorale.parallel.executor import RankedExecutor, RankedGrammars
from chorale.parallel.processes import RankProcesses
from chorale.parallel.rank import Rank
from chorale.parallel.shares import shares_of
from chorale.parallel.wire import Machine, encode
from chorale.runtime.device import Device
from chorale.runtime.executor import LocalExecutor
from chorale.runtime.gpu_faults import explain
from chorale.runtime.sizing.memory import gib
from chorale.runtime.sizing.resolve import Resolved
from chorale.serve.bootstrap import SECRET_VARIABLES, TOOL_KEY_VARIABLES
from chorale.serve.logs import LogOptions, inherited_options

logger = logging.getLogger(__name__)
UNEVEN = 1.05  # least ratio of the tokens that the others could hold to those that the poorest can
RANK_COMMAND = (sys.executable, "-m", "chorale.serve.engine.rank_entry")
MEETING_POINT = "ranks"  # file in a private folder, through which process groups find each other


class RankStart(msgspec.Struct, frozen=True, kw_only=True):
    """A rank process's configuration, from stdin."""

    config: EngineConfig
    folder: str  # of the checkpoint
    rank: int
    meeting_point: str
    parent_pid: int
    descriptor: int  # of its channel
    log: LogOptions


@dataclass(frozen=True, slots=True)
class Place:
    """The device of one rank. ``hardware``: with several ranks, what each has at least; ``rank``: None if
    there is one. ``free_of_ranks``: bytes that each had free."""

    device: Device
    hardware: Hardware
    rank: Rank | None = None
    free_of_ranks: tuple[int, ...] = ()


def start_ranks(
    config: EngineConfig,
    folder: Path,
    on_lost: Callable[[ChoraleError], None] | None = None,
) -> StartedRanks:
    """Starts all ranks but this process. Raises ``EngineError``."""
    private = folder_for_sockets((tempfile.gettempdir(), "/tmp"), "symm_mem-4194304") or Folder()
    log = inherited_options()

    def launch(rank: int, descriptor: int) -> tuple[Sequence[str], bytes]:
        start = RankStart(
            config=config,
            folder=str(folder),
            rank=rank,
            meeting_point=str(private.path / MEETING_POINT),
            parent_pid=os.getpid(),
            descriptor=descriptor,
            log=log,
        )
        return RANK_COMMAND, msgspec.msgpack.encode(start)

    try:
        hidden = SECRET_VARIABLES + TOOL_KEY_VARIABLES
        processes = RankProcesses(
            config.tensor_parallel_size, launch, on_lost, hidden, config.heartbeat_timeout
        )
    except BaseException:
        private.remove()
        raise
    return StartedRanks(processes, private)


class StartedRanks:
    """The ranks while the engine is built."""

    def __init__(self, processes: RankProcesses, private: Folder) -> None:
        self.processes, self._private = processes, private
        self._communicator: Communicator | None = None
        self._links: LinkFinder | None = None  # between GPUs

    def place(self, config: EngineConfig, model: ModelConfig, device: Device) -> Place:
        """Wait until all ranks have opened their devices, connect them, and return rank 0's place."""
        ranks = [device.hardware, *self.processes.opened()]
        uuids = [each.uuid for each in ranks]
        if all(uuids):
            self._links = LinkFinder(uuids)
        machine = common_memory(ranks)
        self.processes.send(encode(machine))
        place = make_place(config, model, device, 0, machine, self._meet)
        if place.rank is not None:
            self._communicator = place.rank.communicator
            self.processes.abort_by(place.rank.communicator.abort)
        return place

    def _meet(self, rank: int, size: int, device: Device) -> Communicator:
        try:
            return connect(self._private.path / MEETING_POINT, rank, size, device.torch_device)
        except Exception as error:
            own = explain(error, "ranks could not be connected", device.hardware.label)
            if own is None:
                own = error if isinstance(error, EngineError) else EngineError(str(error))
            raise self.processes.cause(own) from error

    def links(self) -> str:
        """Returns the kinds of links between the ranks' GPUs ("NVLink (NV18)"), or "" if they are unknown."""
        return "" if self._links is None else self._links.found()

    def join(self, first: LocalExecutor, grammars: GrammarService) -> tuple[RankedExecutor, RankedGrammars]:
        """Wait until all ranks have loaded, and return what runs them together with ``first``."""
        self.processes.wait_ready()
        self._private.remove()  # all have met
        assert self._communicator is not None
        return RankedExecutor(first, self.processes, self._communicator), RankedGrammars(
            grammars, self.processes
        )

    def close(self) -> None:
        if self._communicator is not None:
            self._communicator.abort()
            self._communicator.close()
        self.processes.close()
        self._private.remove()


Meet = Callable[[int, int, Device], Communicator]


def make_place(
    config: EngineConfig, model: ModelConfig, device: Device, rank: int, machine: Machine, meet: Meet
) -> Place:
    """Returns the place of ``rank``. ``machine``: memory that every rank has; ``meet`` connects the ranks."""
    size = config.tensor_parallel_size
    share = shares_of(config, model)[rank]
    hardware = replace(machine.hardware, kind=device.hardware.kind, name=device.hardware.name)
    own = Rank(share, meet(rank, size, device))
    return Place(device, hardware, own, machine.free_of_ranks)


def common_memory(ranks: Sequence[Hardware]) -> Machine:
    """Returns what every rank has, by their numbers: the free memory of the one with the least."""
    poorest = min(ranks, key=lambda each: each.free_bytes)
    least = replace(poorest, total_bytes=min(each.total_bytes for each in ranks))
    return Machine(least, tuple(each.free_bytes for each in ranks))


def note_poorest(place: Place, resolved: Resolved, resolve_with: Callable[[Hardware], Resolved]) -> Resolved:
    """Adds a note if one rank's memory is what limits the KV cache of all."""
    if place.rank is None:
        return resolved
    free, next_free = sorted(place.free_of_ranks)[:2]
    richer = resolve_with(replace(place.hardware, free_bytes=next_free))
    tokens, most = (each.geometry.tokens_in(each.limits.num_blocks) for each in (resolved, richer))
    if most <= tokens * UNEVEN:
        return resolved
    device = f" ({place.hardware.label})" if place.hardware.label else ""
    note = (
        f"rank {place.free_of_ranks.index(free)}{device} has {gib(free)} free and the others at least "
        f"{gib(next_free)}: every rank's KV cache holds what that one can, {tokens:,} tokens "
        f"instead of {most:,}"
    )
    if place.rank.share.rank == 0:
        logger.warning(note)
    return replace(resolved, notes=(*resolved.notes, note))


def exchange_of(place: Place, *, is_over_peers: bool) -> str:
    """Returns how ranks add their parts: "peers" (Chorale's kernels, over each other's memory), "nccl",
    "rccl", "hccl" or "gloo"; "" for one rank."""
    if place.rank is None:
        return ""
    if is_over_peers:
        return "peers"
    platform = PLATFORMS.get(place.hardware.kind)
    return "gloo" if platform is None else platform.library.lower()


def note_slow_exchange(config: EngineConfig, place: Place, resolved: Resolved) -> Resolved:
    """Adds a note about exchanges through NCCL that the operator has not asked for."""
    if config.disable_custom_all_reduce or place.rank is None:
        return resolved
    why = place.rank.communicator.why_no_peers
    reason = f"the GPUs do not reach each other's memory ({why})" if why else "the model is too narrow"
    note = f"ranks exchange through NCCL, which is slower than Chorale's all-reduce: {reason}"
    if place.rank.share.rank == 0:
        logger.warning(note)
    return replace(resolved, notes=(*resolved.notes, note))
