"""RankMemory: the device memory of one rank, which a sleeping engine releases.

The worker with the KV pool, buffers and graphs is dropped, and built again as at start-up: graphs and tables
of addresses refer to memory that does not exist any more. Weights move to host memory (level 1) or are
dropped and read again from the checkpoint (level 2). Adapters in slots move to host memory, because their
files may be gone. All return memory to the driver, so that other processes can use it.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection
from dataclasses import dataclass

import torch

from chorale.engine.commands import TRANSFER_IS_OFF, Command
from chorale.errors import ConfigError, RequestError
from chorale.kernels.ops import Ops
from chorale.model.gpt_oss import GptOss
from chorale.runtime.adapters import AdapterStore
from chorale.runtime.device import Device
from chorale.runtime.drafts.drafting import DraftSetup
from chorale.runtime.worker import Worker

PIECE = 1 << 26  # bytes of one piece of host memory; pinned memory is allocated in powers of two


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a rank reads from checkpoints."""

    model: GptOss
    drafts: DraftSetup | None


class RankMemory:
    """Builds the worker of a rank, takes it apart, and builds it again with the same sizes."""

    def __init__(
        self,
        device: Device,
        load: Callable[[], Loaded],
        make: Callable[[Loaded], Worker],
        transfer: Callable[[Command, Loaded], None] | None = None,
        adapters: AdapterStore | None = None,
    ) -> None:
        """``transfer``: executes the commands of weight transfer (``RankTransfer``); None: it is off."""
        self._device, self._load, self._make = device, load, make
        self._transfer, self._adapters = transfer, adapters
        self._loaded: Loaded | None = None
        self._saved: SavedStorages | None = None  # level 1
        self._saved_adapters: SavedStorages | None = None
        self._wants_cache = False

    def load(self) -> Loaded:
        """Return the weights, which are on the device afterwards, like the adapters."""
        if self._saved_adapters is not None:
            self._saved_adapters.restore(self._device)
            self._saved_adapters = None
        if self._saved is not None:
            self._saved.restore(self._device)
            self._saved = None
        if self._loaded is None:
            self._loaded = self._load()
        return self._loaded

    def make(self) -> Worker:
        """Allocate the KV pool and buffers."""
        return self._make(self.load())

    def transfer(self, command: Command) -> str:
        """Execute a command of weight transfer (``engine.commands.TRANSFERS``). Returns why it was refused,
        or ""."""
        if self._transfer is None or self._loaded is None:
            return TRANSFER_IS_OFF
        try:
            self._transfer(command, self._loaded)
        except (ConfigError, RequestError) as error:
            return error.message
        except torch.OutOfMemoryError as error:
            return f"out of memory: {str(error).splitlines()[0]}"
        return ""

    def release(self, level: int) -> None:
        """Release all device memory. The caller has dropped the worker. May be called again with a higher
        level."""
        self._wants_cache = False
        if self._adapters is not None and self._saved_adapters is None:
            slots = storages_of(self._adapters.on_device(), self._device.torch_device)
            self._saved_adapters = SavedStorages(slots, self._device)
        on_cpu = self._device.torch_device.type == "cpu"
        if level == 1 and self._saved is None and self._loaded is not None and not on_cpu:
            self._saved = SavedStorages(storages_of(self._loaded, self._device.torch_device), self._device)
        elif level == 2:
            self._loaded = self._saved = None
        gc.collect()
        self._device.trim()

    def restore(self, tags: Collection[str]) -> Worker | None:
        """Restore a part of the memory (``MEMORY``). Returns the worker once all of it is wanted: the KV pool
        is allocated last."""
        self._wants_cache |= "kv_cache" in tags
        has_weights = self._loaded is not None and self._saved is None
        if "weights" in tags or (has_weights and self._wants_cache):
            self.load()
            return self.make() if self._wants_cache else None
        return None


class SavedStorages:
    """Copies of device storages in host memory. The storages themselves are empty meanwhile, so that tensors
    and views of them need not be made again."""

    def __init__(self, storages: list[torch.UntypedStorage], device: Device, *, empties: bool = True) -> None:
        """``empties``: False leaves the storages as they are."""
        self._saved: list[tuple[torch.UntypedStorage, list[torch.Tensor]]] = []
        for storage in storages:
            pieces = []
            for piece in octets_of(storage, device.torch_device).split(PIECE):
                pieces.append(device.host_memory(len(piece), torch.uint8))
                pieces[-1].copy_(piece, non_blocking=True)
            self._saved.append((storage, pieces))
        device.mark()()
        for storage in storages if empties else ():
            storage.resize_(0)

    def restore(self, device: Device) -> None:
        for storage, pieces in self._saved:
            if not storage.nbytes():
                storage.resize_(sum(map(len, pieces)))
            for piece, kept in zip(octets_of(storage, device.torch_device).split(PIECE), pieces, strict=True):
                piece.copy_(kept, non_blocking=True)
        device.mark()()


def octets_of(storage: torch.UntypedStorage, device: torch.device) -> torch.Tensor:
    """Return the whole storage as [bytes] uint8."""
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)


def storages_of(root: object, device: torch.device) -> list[torch.UntypedStorage]:
    """Return the storages on ``device`` of all tensors that Chorale's objects, lists and tuples under
    ``root`` contain. Those of ops (workspaces, memory of peers) are not included."""
    found: dict[int, torch.UntypedStorage] = {}
    seen: set[int] = set()
    stack = [root]
    while stack:
        item = stack.pop()
        if id(item) in seen or isinstance(item, Ops):
            continue
        seen.add(id(item))
        if isinstance(item, torch.Tensor):
            storage = item.untyped_storage()
            if item.device == device and storage.nbytes():
                found[storage.data_ptr()] = storage
        elif isinstance(item, (list, tuple)):
            stack += item
        elif isinstance(item, dict):
            stack += item.values()
        elif type(item).__module__.startswith("chorale."):
            names = [name for each in type(item).__mro__ for name in getattr(each, "__slots__", ())]
            stack += [
                getattr(item, name)
                for name in (*names, *getattr(item, "__dict__", ()))
                if hasattr(item, name)
            ]
    return list(found.values())
