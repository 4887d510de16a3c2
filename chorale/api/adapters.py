"""The LoRA adapters that the server serves beside its model, each under a name of its own.

A request for an adapter runs with a copy of the server's state (``select_model``): its turns name the
adapter, and answers carry the adapter's name.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from chorale.config.adapters import LoraModule
from chorale.engine.types import AdapterRef
from chorale.errors import NotFoundError, PermissionDeniedError, RequestError, invalid

MOST_ADAPTERS = 10_000  # names


@dataclass(frozen=True, slots=True)
class ServedAdapter:
    ref: AdapterRef
    base: str | None = None  # the base model's name in /v1/models; None: the first served name


class AdapterRegistry:
    """The adapters of one HTTP process, by name. Those given at start have the same ids in all processes."""

    def __init__(self, modules: Iterable[LoraModule] = ()) -> None:
        self._served: dict[str, ServedAdapter] = {}
        for number, module in enumerate(modules, 1):
            self._served[module.name] = ServedAdapter(
                AdapterRef(number, module.name, module.path), module.base
            )
        self._ids = itertools.count(secrets.randbits(48) + MOST_ADAPTERS)  # engines outlive this process

    def __contains__(self, name: str) -> bool:
        return name in self._served

    @property
    def all(self) -> tuple[ServedAdapter, ...]:
        return tuple(self._served.values())

    def find(self, name: str | None) -> ServedAdapter | None:
        return None if name is None else self._served.get(name)

    def new(self, name: str, path: str) -> AdapterRef:
        """Return an adapter that is not served yet, with an id that none had before."""
        if len(self._served) >= MOST_ADAPTERS:
            raise RequestError(f"{MOST_ADAPTERS} adapters are served; unload one first", param="lora_name")
        return AdapterRef(next(self._ids), name, path)

    def serve(self, ref: AdapterRef) -> AdapterRef | None:
        """Serve an adapter under its name. Returns the one that had the name."""
        before = self._served.pop(ref.name, None)
        self._served[ref.name] = ServedAdapter(ref)
        return None if before is None else before.ref

    def remove(self, name: str) -> AdapterRef:
        if name not in self._served:
            raise NotFoundError(f"the adapter {name[:128]!r} does not exist", param="lora_name")
        return self._served.pop(name).ref


def allowed_folder(path: str, folders: Iterable[str]) -> Path:
    """Return the folder of an adapter, with links resolved. Raises ``RequestError`` unless it is in one of
    the operator's folders."""
    if not path or "\0" in path or len(path) > 4096:
        raise invalid("lora_path", "must be the path of a folder")
    try:
        found = Path(path).resolve()
        allowed = [Path(folder).resolve() for folder in folders]
    except (OSError, RuntimeError) as fault:
        raise invalid("lora_path", "cannot be resolved") from fault
    if not any(found.is_relative_to(folder) for folder in allowed):
        raise PermissionDeniedError(
            "lora_path: the folder is not in one of the server's --lora-dirs", param="lora_path"
        )
    return found
