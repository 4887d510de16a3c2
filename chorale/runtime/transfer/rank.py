"""RankTransfer: the weight updates of one rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch

from chorale.config.weight_transfer import WeightTransferConfig
from chorale.engine.commands import Command
from chorale.errors import RequestError
from chorale.model.update import Target, WeightUpdate
from chorale.runtime.device import Device
from chorale.runtime.rank_memory import Loaded, SavedStorages, octets_of, storages_of
from chorale.runtime.transfer.base import Backend
from chorale.runtime.transfer.checkpoint import CheckpointBackend
from chorale.runtime.transfer.ipc import IpcBackend
from chorale.runtime.transfer.nccl import NcclBackend

SCRATCH = 3 * 2**30  # bytes that packing needs on a device, beside the weights


class RankTransfer:
    """Executes the commands of weight transfer. No step runs between the start and the end of an update."""

    def __init__(self, config: WeightTransferConfig, target: Target, device: Device, rank: int) -> None:
        """``rank``: of this engine's ranks."""
        self._config, self._target, self._device, self._rank = config, target, device, rank
        self._backend: Backend | None = None
        self._update: WeightUpdate | None = None
        self._old = OldValues(device)

    def execute(self, command: Command, loaded: Loaded) -> None:
        """Raises ``RequestError`` or ``ConfigError`` if the sender or its tensors are at fault."""
        if command.action == "init_weight_transfer_engine":
            self._open(command).init(command.info)
        elif command.action == "shutdown_weight_transfer_engine":
            if self._backend is not None:
                self._backend.close()
        elif command.action == "start_weight_update":
            weights = loaded.model.weights
            in_place = self._device.torch_device.type != "cpu"
            if in_place:
                self._old.choose_place(storages_of(weights, self._device.torch_device))
            self._update = WeightUpdate(self._target, weights, self._old.save if in_place else None)
        elif command.action == "update_weights":
            self._receive(command)
        elif command.action == "prepare_weight_update":
            self._active.check_complete()
        elif command.action == "finish_weight_update":
            self._finish(loaded)
        elif command.action == "abandon_weight_update":
            self._old.restore()
            self._end()

    @property
    def _active(self) -> WeightUpdate:
        if self._update is None:
            raise RequestError("no weight update is in progress")
        return self._update

    def _open(self, command: Command) -> Backend:
        if self._backend is not None:
            self._backend.close()
        device = self._device.torch_device
        if self._config.backend == "checkpoint":
            self._backend = CheckpointBackend(self._config.allowed_folders)
        elif self._config.backend == "ipc":
            self._backend = IpcBackend(device)
        else:
            self._backend = NcclBackend(device, command.first_rank + self._rank)
        return self._backend

    def _receive(self, command: Command) -> None:
        update, backend = self._active, self._backend
        if backend is None:
            raise RequestError("init_weight_transfer_engine was not called")
        for name, tensor in backend.receive(command.info, update.check):
            update.add(name, tensor)
        if self._device.torch_device.type != "cpu":
            update.keep()

    def _finish(self, loaded: Loaded) -> None:
        model, before = loaded.model, loaded.model.weights
        model.replace_weights(self._active.finish())
        head = None if loaded.drafts is None else loaded.drafts.head
        if head is not None and head.weights.embedding is before.embedding:
            head.weights = replace(head.weights, embedding=model.weights.embedding)
        self._old.forget()
        self._end()

    def _end(self) -> None:
        self._update = None
        if self._backend is not None:
            self._backend.finished()


class OldValues:
    """Values of tensors that an update has overwritten: on the device if they fit there beside the new ones,
    else in host memory."""

    def __init__(self, device: Device) -> None:
        self._device, self._on_host = device, False
        self._saved: list[Callable[[], object]] = []

    def choose_place(self, storages: Sequence[torch.UntypedStorage]) -> None:
        """``storages``: all weights."""
        needed = sum(storage.nbytes() for storage in storages) + SCRATCH
        self._on_host = free_bytes(self._device.torch_device) < needed

    def save(self, tensors: Sequence[torch.Tensor]) -> None:
        """Save the values of some tensors, which may share storages."""
        for storage in {
            each.untyped_storage().data_ptr(): each.untyped_storage() for each in tensors
        }.values():
            if self._on_host and storage.device.type != "cpu":
                saved = SavedStorages([storage], self._device, empties=False)
                self._saved.append(partial(saved.restore, self._device))
            else:
                octets = octets_of(storage, storage.device)
                self._saved.append(partial(octets.copy_, octets.clone()))

    def restore(self) -> None:
        """Restore all values, the last saved ones first."""
        while self._saved:
            self._saved.pop()()

    def forget(self) -> None:
        self._saved.clear()


def free_bytes(device: torch.device) -> int:
    """Return the bytes of a GPU that this process can allocate; 0 if they are not known."""
    if device.type != "cuda":
        return 0
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + cached
