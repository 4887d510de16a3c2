"""LoRARequest: the adapter of a call of ``LLM``, with vLLM's fields."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from dataclasses import dataclass

from chorale.engine.types import BASE, AdapterRef


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """``lora_int_id`` identifies the adapter's weights; ``load_inplace`` reads them again from now on."""

    lora_name: str
    lora_int_id: int
    lora_path: str
    base_model_name: str | None = None  # no effect
    load_inplace: bool = False
    is_3d_lora_weight: bool = False  # no effect: the file shows it

    def __post_init__(self) -> None:
        if self.lora_int_id < 1:
            raise ValueError(f"lora_int_id must be at least 1, not {self.lora_int_id}")
        if not self.lora_path or not self.lora_name:
            raise ValueError("lora_name and lora_path must not be empty")


LoraOfPrompts = LoRARequest | Sequence[LoRARequest | None] | None


class LlmAdapters:
    """The engine's names of adapters. A new folder, or ``load_inplace``, makes a new one."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, str], AdapterRef] = {}
        self._ids = itertools.count(1_000_000)  # above those of lora_modules

    def refs(self, given: LoraOfPrompts, count: int) -> list[AdapterRef]:
        """Return the adapter of each of ``count`` prompts. Raises ``TypeError`` or ``ValueError``."""
        if given is None or isinstance(given, LoRARequest):
            return [self._ref(given)] * count
        if len(given) != count:
            raise ValueError(f"there are {count} prompts and {len(given)} lora_request")
        return [self._ref(each) for each in given]

    def _ref(self, request: LoRARequest | None) -> AdapterRef:
        if request is None:
            return BASE
        if not isinstance(request, LoRARequest):
            raise TypeError(f"lora_request must be a LoRARequest, not {type(request).__name__}")
        key = request.lora_int_id, os.path.abspath(request.lora_path)
        if key not in self._known or request.load_inplace:
            self._known[key] = AdapterRef(next(self._ids), request.lora_name, key[1])
        return self._known[key]
