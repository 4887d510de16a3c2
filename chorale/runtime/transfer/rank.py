"""RankTransfer: the weight updates of one rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch

from chorale.config.weight_transfer import WeightTransferConfig
from chorale.engine.commands import Command
from chorale.errors import RequestError
from chorale.model.update import WeightUpdate
from chorale.model.weights import Target
from chorale.runtime.device import Device
from chorale.runtime.rank_memory import Loaded, SavedStorages, octets_of, storages_of
from chorale.runtime.transfer.checkpoint import CheckpointBackend
from chorale.runtime.transfer.ipc import IpcBackend
from chorale.runtime.transfer.nccl import NcclBackend

Backend = CheckpointBackend | IpcBackend | NcclBackend
SCRATCH = 3 * 2**30  # bytes that packing needs on a device, beside the weights


class RankTransfer:
    """Executes the commands of weight transfer. No step runs between the start and the end of an update."""

    def __init__(self, config: WeightTransferConfig, target: Target, device: Device, rank: int) -> None:
        """``rank``: of this engine's ranks."""
        self._config, self._target, self._device, self._rank = config, target, device, rank
        self._backend: Backend | None = None
        self._update: WeightUpdate | None = None
        self._restores: list[Callable[[], object]] = []  # write back what an update has overwritten
        self._on_host = False  # where these values wait: on the device if a copy of all weights fits there

    def execute(self, command: Command, loaded: Loaded) -> None:
        """Raises ``RequestError`` or ``ConfigError`` if the sender or its tensors are at fault."""
        action = command.action
        if action == "init_weight_transfer_engine":
            self._close()
            self._backend = self._make_backend(command)
            self._backend.init(command.info)
        elif action == "shutdown_weight_transfer_engine":
            self._close()
        elif action == "start_weight_update":
            weights, device = loaded.model.weights, self._device.torch_device
            needed = SCRATCH + sum(storage.nbytes() for storage in storages_of(weights, device))
            self._on_host = device.type != "cuda" or torch.cuda.mem_get_info(device)[0] < needed
            self._update = WeightUpdate(self._target, weights, None if device.type == "cpu" else self._save)
        elif action == "abandon_weight_update":
            for restore in reversed(self._restores):
                restore()
            self._end()
        elif self._update is None:
            raise RequestError("no weight update is in progress")
        elif action == "update_weights":
            self._receive(self._update, command)
        elif action == "prepare_weight_update":
            self._update.check_complete()
        elif action == "finish_weight_update":
            self._finish(self._update, loaded)

    def _make_backend(self, command: Command) -> Backend:
        config, device = self._config, self._device.torch_device
        if config.backend == "checkpoint":
            return CheckpointBackend(config.allowed_folders)
        if config.backend == "ipc":
            return IpcBackend(device, allowed=config.allow_pickled_handles)
        return NcclBackend(device, command.first_rank + self._rank)

    def _receive(self, update: WeightUpdate, command: Command) -> None:
        if self._backend is None:
            raise RequestError("init_weight_transfer_engine was not called")
        for name, tensor in self._backend.receive(command.info, update.check):
            update.add(name, tensor)
        if self._device.torch_device.type != "cpu":
            update.keep()

    def _finish(self, update: WeightUpdate, loaded: Loaded) -> None:
        model, before = loaded.model, loaded.model.weights
        model.weights = update.finish()
        pairs = zip(model.weights.layers, model.layers, strict=True)
        model.layers = [(new, group, tensor, shape) for new, (_, group, tensor, shape) in pairs]
        head = None if loaded.drafts is None else loaded.drafts.head
        if head is not None and head.weights.embedding is before.embedding:
            head.weights = replace(head.weights, embedding=model.weights.embedding)
        self._end()

    def _end(self) -> None:
        self._update = None
        self._restores.clear()
        if self._backend is not None:
            self._backend.ended()

    def _save(self, tensors: Sequence[torch.Tensor]) -> None:
        storages = {each.untyped_storage().data_ptr(): each.untyped_storage() for each in tensors}
        for storage in storages.values():
            if self._on_host and storage.device.type != "cpu":
                saved = SavedStorages([storage], self._device, empties=False)
                self._restores.append(partial(saved.restore, self._device))
            else:
                octets = octets_of(storage, storage.device)
                self._restores.append(partial(octets.copy_, octets.clone()))

    def _close(self) -> None:
        if self._backend is not None:
            self._backend.close()
        self._backend = None
