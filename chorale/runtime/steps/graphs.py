"""StepGraphs: what captured steps of every kind have: graphs, static input, and host memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from chorale.runtime.device import Device


@dataclass(slots=True)
class StagingBuffers:
    """Host memory of one step in flight, pinned on a GPU."""

    inputs: torch.Tensor  # int32
    tokens: torch.Tensor  # int64


class StepGraphs:
    """Owns the graphs of one kind of step by their sizes, the input that they read, and staging buffers.

    ``device.capture`` makes the graphs; a device without graphs may run the steps themselves.
    """

    def __init__(self, device: Device, num_inputs: int, num_tokens: int = 0) -> None:
        """``num_inputs``: int32 of the largest step; ``num_tokens``: its samples."""
        self._device, self._num_tokens = device, num_tokens
        self._inputs = torch.zeros(num_inputs, dtype=torch.int32, device=device.torch_device)
        self._graphs: dict[tuple[int, ...], Callable[[], None]] = {}
        self._free: list[StagingBuffers] = []

    @property
    def num_graphs(self) -> int:
        return len(self._graphs)

    def graph(self, *key: int) -> Callable[[], None]:
        """Return the graph of a size (the arguments of ``_step``), capturing it on first use."""
        found = self._graphs.get(key)
        if found is None:
            self._fill_dummies(*key)  # capturing runs the step, which must not touch real rows
            found = self._graphs[key] = self._device.capture(self._step(*key))
        return found

    def _fill_dummies(self, *key: Any, **_: Any) -> None:
        """Fill the input of a size with dummy rows."""
        raise NotImplementedError

    def _step(self, *key: Any, **_: Any) -> Callable[[], None]:
        """Return the step that a graph contains. It uses static memory only."""
        raise NotImplementedError

    def _stage(self) -> StagingBuffers:
        if self._free:
            return self._free.pop()
        inputs = self._device.host_memory(len(self._inputs), torch.int32)
        return StagingBuffers(inputs, self._device.host_memory(self._num_tokens, torch.int64))

    def _download(self, staging: StagingBuffers, tokens: torch.Tensor) -> Callable[[], npt.NDArray[np.int64]]:
        """Enqueue the download of ``tokens`` [N]. Returns a function that waits for them; call it once."""
        found = staging.tokens[: len(tokens)]
        found.copy_(tokens, non_blocking=True)
        wait = self._device.mark()

        def finish() -> npt.NDArray[np.int64]:
            wait()
            copy: npt.NDArray[np.int64] = found.numpy().copy()
            self._free.append(staging)  # the device has finished with it
            return copy

        return finish
