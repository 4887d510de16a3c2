"""Plants a fault in processes that have this folder first on PYTHONPATH (``device.faults.environment``).

Python imports this module when it starts. The fault is planted when the faulty module is imported, so that
the order of imports does not change.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any


class _Finder(importlib.abc.MetaPathFinder):
    """Finds one module through the other finders, and calls ``change`` with it once it is imported."""

    def __init__(self, name: str, change: Any) -> None:
        self._name, self._change = name, change

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != self._name:
            return None
        sys.meta_path.remove(self)
        spec: Any = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            self._change(module)

        spec.loader.exec_module = exec_module
        return spec


def _stale_page(module: Any) -> None:
    """Full-attention layers read page 3 instead of page 4, as if a table update had been lost."""
    from dataclasses import replace

    select_ops = module.select_ops

    def select(*arguments: Any, **options: Any) -> Any:
        ops = select_ops(*arguments, **options)

        def plan(meta: Any, shape: Any, block_size: int) -> Any:
            full, window = meta.block_tables
            if full.shape[1] > 4:
                full = full.clone()
                full[:, 4] = full[:, 3]
            return ops.plan_attention(replace(meta, block_tables=(full, window)), shape, block_size)

        return replace(ops, plan_attention=plan)

    module.select_ops = select


def _norm_epsilon(module: Any) -> None:
    rms_norm = module.rms_norm
    module.rms_norm = lambda x, weight, eps: rms_norm(x, weight, 10 * eps)


def _temperature_twice(module: Any) -> None:
    """Squares temperatures where requests become rows of the engine."""
    floats = module.RowSamplingState.floats

    def squared(self: Any, rows: Any) -> Any:
        found = floats(self, rows)
        found[0] **= 2
        return found

    module.RowSamplingState.floats = squared


def _digits_by_two(module: Any) -> None:
    module.PIECE_PATTERN = module.PIECE_PATTERN.replace("{1,3}", "{1,2}")


_CHANGES = {
    "stale_page": ("chorale.kernels", _stale_page),
    "norm_epsilon": ("chorale.kernels.reference.ops", _norm_epsilon),
    "temperature_twice": ("chorale.runtime.sampling.row_state", _temperature_twice),
    "digits_by_two": ("chorale.harmony.bpe", _digits_by_two),
}


for _fault in filter(None, os.environ.get("CHORALE_TEST_FAULT", "").split(",")):
    sys.meta_path.insert(0, _Finder(*_CHANGES[_fault]))
