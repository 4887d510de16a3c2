"""AdapterStore: LoRA adapters in host memory and in the slots of one rank's device.

A thread reads, converts and uploads, so that steps go on meanwhile. ``slots`` changes only at the end of a
placement, and only in slots that no step uses. Adapters in host memory keep the types of their files; those
used least recently are dropped, and read again when they are needed.

Kernels that find adapters by slot number (``LoraOps.make_slots``) also run in captured steps: these read the
slots of rows from device memory.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch

from chorale.engine.types import AdapterRef, IntArray, StepPlan
from chorale.errors import AdapterError
from chorale.kernels.adapters import HEADS, NONE, Adapter, AdapterBatch, AdapterSlots
from chorale.model.config import ModelConfig
from chorale.model.lora.read import read_adapter
from chorale.model.lora.share import part_of_rank
from chorale.parallel.shares import Share
from chorale.runtime.device import Device


class AdapterStore:
    """The ``AdapterService`` of an engine, and the adapters of its worker's steps."""

    def __init__(
        self,
        model: ModelConfig,
        device: Device,
        dtype: torch.dtype,
        *,
        num_slots: int,
        num_host: int,
        max_rank: int,
        num_rows: int,
        share: Share | None = None,
        memory: AdapterSlots | None = None,
    ) -> None:
        """``dtype``: type of the additions' products; ``num_host``: adapters that stay in host memory;
        ``share``: this rank's, if there are several; ``memory``: the slots, if the ops have made any."""
        self._model, self._device, self._dtype = model, device, dtype
        self.max_rank, self._num_host, self._share = max_rank, num_host, share
        self._slots: list[Adapter | None] = [None] * num_slots
        self._host: OrderedDict[int, Adapter] = OrderedDict()  # in LRU order; only the thread uses it
        self._row_slots: IntArray = np.full(num_rows + 1, -1, np.int32)
        self._memory, self._reach = memory, np.zeros(num_slots + 1, np.int32)  # the last: of slot -1
        # ``_row_slots`` on the device. Unused without ``memory``.
        self._device_slots = torch.full((num_rows + 1,), -1, dtype=torch.int32, device=device.torch_device)
        self._thread = ThreadPoolExecutor(1, "adapters")
        self._stream = device.stream()

    # ------------------------------------------------------------------ AdapterService

    def load(self, adapter: AdapterRef) -> Future[None]:
        return self._thread.submit(self._load, adapter)

    def place(self, adapter: AdapterRef, slot: int) -> Future[None]:
        self._slots[slot] = None
        return self._thread.submit(self._place, adapter, slot, self._device.mark())

    def forget(self, adapter_id: int) -> None:
        self._thread.submit(self._host.pop, adapter_id, None)

    def on_device(self) -> list[object]:
        """Return the adapters in the slots and the slots' memory, once no placement is in progress."""
        self._thread.submit(lambda: None).result()
        return [*self._slots, self._memory]

    def close(self) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _load(self, adapter: AdapterRef) -> None:
        self._host_copy(adapter)

    @torch.inference_mode()
    def _place(self, adapter: AdapterRef, slot: int, wait: Callable[[], None]) -> None:
        wait()  # a step whose request was aborted may still read memory that is reused now
        with self._stream.current():
            found = self._host_copy(adapter)
            if self._memory is None:
                found = found.map(self._uploaded)
            else:
                self._memory.write(slot, found)
            self._device.mark()()
        self._reach[slot] = found.reach
        self._slots[slot] = found

    def _uploaded(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self._device.torch_device, self._dtype).contiguous()

    def _host_copy(self, adapter: AdapterRef) -> Adapter:
        found = self._host.get(adapter.id)
        if found is None:
            found = read_adapter(Path(adapter.path), self._model, self.max_rank)
            if self._share is not None:
                found = part_of_rank(found, self._model, self._share)
            self._host[adapter.id] = found
        self._host.move_to_end(adapter.id)
        while len(self._host) > self._num_host:
            self._host.popitem(last=False)
        return found

    # ------------------------------------------------------------------ steps

    def start_rows(self, plan: StepPlan) -> int:
        """Note the adapters of the rows that start, and return what those of the plan's rows change. Call
        before anything else for the plan."""
        changed = False
        for start in plan.starts:
            changed |= bool(self._row_slots[start.row] != start.adapter_slot)
            self._row_slots[start.row] = start.adapter_slot
        if changed and self._memory is not None:
            self._device_slots.copy_(self._device.upload(self._row_slots.copy()))
        return self.reach(plan)

    @property
    def can_capture(self) -> bool:
        return self._memory is not None

    def reach(self, plan: StepPlan) -> int:
        """Return what the adapters of the plan's rows change."""
        return int(self._reach[self._row_slots[plan.rows]].max(initial=NONE))

    def of_rows(self, rows: torch.Tensor, reach: int) -> Any:
        """Return the adapters of tokens of ``rows`` [T] on the device, for ``LoraOps``; None if ``reach`` is
        ``NONE``. A captured step may do this."""
        if reach == NONE:
            return None
        assert self._memory is not None
        return self._memory.batch(self._device_slots.index_select(0, rows), reach)

    def batch(self, plan: StepPlan) -> Any:
        """Return the adapters of the plan's tokens, for ``LoraOps``, or None if there are none."""
        slots = self._row_slots[plan.rows]
        if not (slots >= 0).any():
            return None
        of_tokens = np.repeat(slots, plan.num_new)
        if self._memory is not None:
            return self._memory.batch(self._device.upload(of_tokens), self.reach(plan))
        groups = []
        for slot in np.unique(slots[slots >= 0]).tolist():
            adapter = self._slots[slot]
            if adapter is None:
                raise AdapterError(f"slot {slot} has no adapter")
            groups.append((adapter, self._uploaded_indices(np.flatnonzero(of_tokens == slot))))
        return AdapterBatch(self._uploaded_indices(of_tokens), tuple(groups))

    def _uploaded_indices(self, array: np.ndarray[tuple[int], np.dtype[np.integer]]) -> torch.Tensor:
        return self._device.upload(array.astype(np.int32)).long()


def captures(adapters: AdapterStore | None, reach: int) -> bool:
    """Return whether steps whose adapters change ``reach`` can be captured. Which heads a step needs, and
    where they are, is known only when it runs."""
    return reach == NONE or (reach != HEADS and adapters is not None and adapters.can_capture)
