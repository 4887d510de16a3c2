"""AdapterQueue: which LoRA adapters have a slot on the device, and the requests that wait for one.

A request enters the engine when its adapter is in a slot, and keeps the slot until it ends. So a step never
has more adapters than slots, and the scheduler knows nothing of them. The slot of the adapter that was used
least recently is given to another one; adapters are placed while steps run.

A request may overtake those that wait for a slot, because its adapter has one. Once the oldest has waited for
``PATIENCE`` seconds, none may, so that a slot becomes free.
"""

from __future__ import annotations

import concurrent.futures
from collections import Counter, deque
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Protocol

from chorale.engine.types import AdapterRef, GenerateRequest
from chorale.errors import ChoraleError

NO_ADAPTERS = "adapters are off; start the engine with --enable-lora"
PATIENCE = 1.0  # seconds
_WAIT = 0.01  # seconds that an idle engine waits for a placement before it reads its inbox again


class AdapterService(Protocol):
    """Reads adapters and places them on the device, in a thread."""

    def load(self, adapter: AdapterRef) -> Future[None]:
        """Read and check an adapter. The future has an ``AdapterError`` if it cannot be used."""
        ...

    def place(self, adapter: AdapterRef, slot: int) -> Future[None]:
        """Put an adapter into a slot that no step uses; read it if it is not in host memory."""
        ...

    def forget(self, adapter_id: int) -> None:
        """Release the host memory of an adapter."""
        ...

    def close(self) -> None: ...


class AdapterQueue:
    """The slots and the queue of one engine."""

    def __init__(self, service: AdapterService | None, num_slots: int) -> None:
        self._service = service
        self._slots: list[int] = [0] * num_slots  # adapter id; 0: free
        self._used: dict[int, int] = {}  # slot -> number of its last use
        self._uses = 0
        self._users: Counter[int] = Counter()  # requests in the engine, by adapter id
        self._names: dict[int, str] = {}
        self._placing: dict[int, Future[None]] = {}  # by adapter id
        self._waiting: deque[tuple[float, GenerateRequest]] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, request_id: str) -> bool:
        return any(request.request_id == request_id for _, request in self._waiting)

    def refusal(self, adapter: AdapterRef) -> str | None:
        return NO_ADAPTERS if self._service is None and adapter.id else None

    def slot_of(self, adapter: AdapterRef) -> int:
        """Return the slot of a request in the engine, -1 for the base model."""
        return self._slots.index(adapter.id) if adapter.id else -1

    def admit(self, request: GenerateRequest, now: float) -> bool:
        """Return whether the request may enter the engine; otherwise it waits here."""
        adapter_id = request.adapter.id
        if not adapter_id:
            return True
        if self._is_placed(adapter_id) and not self._is_starving(now):
            self._take(request)
            return True
        self._waiting.append((now, request))
        return False

    def take_ready(self, now: float, *, wait: bool) -> Iterator[tuple[GenerateRequest, str | None]]:
        """Remove the requests whose adapters are placed and those whose adapters cannot be used, each with
        the reason, or None. Starts placements."""
        if wait and self._placing:
            concurrent.futures.wait(self._placing.values(), _WAIT, concurrent.futures.FIRST_COMPLETED)
        faults = self._finish_placements()
        starving = self._is_starving(now)
        waiting, self._waiting = self._waiting, deque()
        has_passed = False  # a request waits for a slot
        for since, request in waiting:
            adapter = request.adapter
            if adapter.id in faults:
                yield request, faults[adapter.id]
            elif self._is_placed(adapter.id) and not (starving and has_passed):
                self._take(request)
                yield request, None
            else:
                if not has_passed or not starving:
                    has_passed |= not self._place(adapter)
                self._waiting.append((since, request))

    def release(self, adapter: AdapterRef) -> None:
        """A request has left the engine."""
        if adapter.id:
            self._users[adapter.id] -= 1
            if not self._users[adapter.id]:
                del self._users[adapter.id], self._names[adapter.id]

    def remove(self, request_id: str) -> GenerateRequest | None:
        found = next((entry for entry in self._waiting if entry[1].request_id == request_id), None)
        if found is None:
            return None
        self._waiting.remove(found)
        return found[1]

    def remove_all(self) -> list[GenerateRequest]:
        dropped = [request for _, request in self._waiting]
        self._waiting.clear()
        return dropped

    def load(self, adapter: AdapterRef) -> Future[None]:
        assert self._service is not None
        return self._service.load(adapter)

    def forget(self, adapter: AdapterRef) -> None:
        """Release an adapter's memory. Requests in the engine still use its slot, which is reused later."""
        assert self._service is not None
        self._service.forget(adapter.id)
        if adapter.id in self._slots and not self._users[adapter.id]:
            self._used[self._slots.index(adapter.id)] = 0

    @property
    def running(self) -> tuple[str, ...]:
        """The names of the adapters of requests in the engine."""
        return tuple(sorted(set(self._names.values())))

    @property
    def waiting(self) -> tuple[str, ...]:
        """The names of the adapters that wait for a slot."""
        return tuple(sorted({request.adapter.name for _, request in self._waiting}))

    def close(self) -> None:
        if self._service is not None:
            self._service.close()

    # ------------------------------------------------------------------ slots

    def _is_placed(self, adapter_id: int) -> bool:
        return adapter_id in self._slots and adapter_id not in self._placing

    def _is_starving(self, now: float) -> bool:
        oldest = next(iter(self._waiting), None)
        return oldest is not None and now - oldest[0] > PATIENCE and not self._is_placed(oldest[1].adapter.id)

    def _take(self, request: GenerateRequest) -> None:
        adapter = request.adapter
        self._users[adapter.id] += 1
        self._names[adapter.id] = adapter.name
        self._touch(self._slots.index(adapter.id))

    def _touch(self, slot: int) -> None:
        self._uses += 1
        self._used[slot] = self._uses

    def _place(self, adapter: AdapterRef) -> bool:
        """Start to place an adapter. Returns False if every slot is in use."""
        if adapter.id in self._slots:
            return True
        free = [
            slot
            for slot, owner in enumerate(self._slots)
            if not self._users[owner] and owner not in self._placing
        ]
        if not free or self._service is None:
            return False
        slot = min(free, key=lambda each: self._used.get(each, 0))
        self._slots[slot] = adapter.id
        self._touch(slot)
        self._placing[adapter.id] = self._service.place(adapter, slot)
        return True

    def _finish_placements(self) -> dict[int, str]:
        """Return why placements have failed, by adapter id."""
        faults = {}
        for adapter_id in [each for each, future in self._placing.items() if future.done()]:
            error = self._placing.pop(adapter_id).exception()
            if error is not None:
                self._slots[self._slots.index(adapter_id)] = 0
                known = isinstance(error, ChoraleError)
                faults[adapter_id] = (
                    str(error) if known else f"the adapter cannot be used: {type(error).__name__}"
                )
        return faults
