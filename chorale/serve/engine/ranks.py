"""Starts the rank processes of an engine, connects them, and compares their memory before loading."""

from __future__ import annotations

import logging
import os
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
from chorale.machine.processes import module_command
from chorale.model.config import ModelConfig
from chorale.parallel.communicator import Communicator
from chorale.parallel.distributed import connect
from chorale.parallel.processes import RankProcesses
from chorale.parallel.rank import Rank
from chorale.parallel.services import RankedGrammars
from chorale.parallel.shares import shares_of
from chorale.parallel.wire import Machine, encode
from chorale.runtime.device import Device
from chorale.runtime.executor import LocalExecutor, OtherRanks
from chorale.runtime.gpu_faults import explain
from chorale.runtime.sizing.memory import gib
from chorale.runtime.sizing.resolve import Resolved
from chorale.serve.bootstrap import SECRET_VARIABLES, TOOL_KEY_VARIABLES, ChildStart
from chorale.serve.logs import inherited_options

logger = logging.getLogger(__name__)
UNEVEN = 1.05  # warn if the KV cache could grow by this factor without the rank with the least memory
RANK_COMMAND = module_command("chorale.serve.engine.rank_entry")
MEETING_POINT = "ranks"  # name of the rendezvous file of the process group, in a private folder


class RankStart(ChildStart, frozen=True, kw_only=True):
    """A rank process's configuration, from stdin."""

    config: EngineConfig
    folder: str  # path of the checkpoint folder
    rank: int
    meeting_point: str  # path of the rendezvous file
    descriptor: int  # file descriptor of the channel to the engine process


@dataclass(frozen=True, slots=True)
class RankDevice:
    """The device of one rank. With several ranks, ``hardware`` has the least memory of any of them.
    ``rank``: None if the engine has only one. ``free_of_ranks``: free bytes of each rank before loading."""

    device: Device
    hardware: Hardware
    rank: Rank | None = None
    free_of_ranks: tuple[int, ...] = ()


def start_ranks(
    config: EngineConfig,
    folder: Path,
    on_lost: Callable[[ChoraleError], None] | None = None,
) -> StartedRanks:
    """Starts a process for each rank except rank 0, which is this process. Raises ``EngineError``."""
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
    """The rank processes while the engine is built."""

    def __init__(self, processes: RankProcesses, private: Folder) -> None:
        self.processes, self._private = processes, private
        self._communicator: Communicator | None = None
        self._links: LinkFinder | None = None  # finds the links between GPUs

    def connect(self, config: EngineConfig, model: ModelConfig, device: Device) -> RankDevice:
        """Wait until all ranks have opened their devices, connect them, and return the device of rank 0."""
        ranks = [device.hardware, *self.processes.opened()]
        uuids = [each.uuid for each in ranks]
        if all(uuids):
            self._links = LinkFinder(uuids)
        machine = common_memory(ranks)
        self.processes.send(encode(machine))
        try:
            rank = connect_rank(config, model, device, 0, self._private.path / MEETING_POINT)
        except Exception as error:
            own = explain(error, "ranks could not be connected", device.hardware.label)
            if own is None:
                own = error if isinstance(error, EngineError) else EngineError(str(error))
            raise self.processes.cause(own) from error
        self._communicator = rank.communicator
        self.processes.abort_by(rank.communicator.abort)
        return make_rank_device(device, rank, machine)

    def links(self) -> str:
        """Returns the kinds of links between the ranks' GPUs ("NVLink (NV18)"), or "" if they are unknown."""
        return "" if self._links is None else self._links.found()

    def join(self, first: LocalExecutor, grammars: GrammarService) -> RankedGrammars:
        """Wait until all ranks have loaded, and let ``first`` use them. Returns the grammars of all ranks."""
        self.processes.wait_ready()
        assert self._communicator is not None
        first.join(OtherRanks(self.processes, self._communicator, self._private))
        return RankedGrammars(grammars, self.processes)

    def close(self) -> None:
        if self._communicator is not None:
            self._communicator.abort()
            self._communicator.close()
        self.processes.close()
        self._private.remove()


def connect_rank(
    config: EngineConfig, model: ModelConfig, device: Device, number: int, meeting_point: Path
) -> Rank:
    """Connects one rank to the others. Raises ``CommunicationError``."""
    size, seconds = config.tensor_parallel_size, config.distributed_timeout_seconds
    communicator = connect(meeting_point, number, size, device.torch_device, seconds)
    return Rank(shares_of(config, model)[number], communicator)


def make_rank_device(device: Device, rank: Rank, machine: Machine) -> RankDevice:
    """Returns the device of ``rank``. ``machine``: the common memory."""
    hardware = replace(machine.hardware, kind=device.hardware.kind, name=device.hardware.name)
    return RankDevice(device, hardware, rank, machine.free_of_ranks)


def common_memory(ranks: Sequence[Hardware]) -> Machine:
    """Returns the least total and the least free memory of all ranks. ``ranks``: in order of rank."""
    poorest = min(ranks, key=lambda each: each.free_bytes)
    least = replace(poorest, total_bytes=min(each.total_bytes for each in ranks))
    return Machine(least, tuple(each.free_bytes for each in ranks))


def note_poorest(
    rank_device: RankDevice, resolved: Resolved, resolve_with: Callable[[Hardware], Resolved]
) -> Resolved:
    """Adds a note if the memory of one rank limits the KV cache of all ranks."""
    if rank_device.rank is None:
        return resolved
    free, next_free = sorted(rank_device.free_of_ranks)[:2]
    richer = resolve_with(replace(rank_device.hardware, free_bytes=next_free))
    tokens, most = (each.geometry.tokens_in(each.limits.num_blocks) for each in (resolved, richer))
    if most <= tokens * UNEVEN:
        return resolved
    device = f" ({rank_device.hardware.label})" if rank_device.hardware.label else ""
    note = (
        f"rank {rank_device.free_of_ranks.index(free)}{device} has {gib(free)} free and the others at least "
        f"{gib(next_free)}: every rank's KV cache holds what that one can, {tokens:,} tokens "
        f"instead of {most:,}"
    )
    if rank_device.rank.share.rank == 0:
        logger.warning(note)
    return replace(resolved, notes=(*resolved.notes, note))


def exchange_of(rank_device: RankDevice, *, is_over_peers: bool) -> str:
    """Returns how ranks sum tensors: "peers" (Chorale's kernels, which read peer memory), "nccl", "rccl",
    "hccl" or "gloo"; "" for one rank."""
    if rank_device.rank is None:
        return ""
    if is_over_peers:
        return "peers"
    platform = PLATFORMS.get(rank_device.hardware.kind)
    return "gloo" if platform is None else platform.library.lower()


def note_slow_exchange(config: EngineConfig, rank_device: RankDevice, resolved: Resolved) -> Resolved:
    """Adds a note if ranks exchange through NCCL although the operator did not request it."""
    if config.disable_custom_all_reduce or rank_device.rank is None:
        return resolved
    why = rank_device.rank.communicator.why_no_peers
    reason = f"the GPUs cannot reach each other's memory ({why})" if why else "the model is too narrow"
    note = f"ranks exchange through NCCL, which is slower than Chorale's all-reduce: {reason}"
    if rank_device.rank.share.rank == 0:
        logger.warning(note)
    return replace(resolved, notes=(*resolved.notes, note))
