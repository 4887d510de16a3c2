"""Dry run: runs every kind of step once, with two layers, to find the kernels that steps launch.

Nothing is launched: the op set's precompiler records the kernels. The executors have a pool of one block, and
tensors with the real shapes, types and alignments, by which Triton specialises kernels.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt

from chorale.engine.types import StepPlan
from chorale.kernels.ops import Allowed
from chorale.model.gpt_oss import GptOss
from chorale.runtime.device import Device
from chorale.runtime.executor import LocalExecutor
from chorale.runtime.sampling.grammar import GrammarRows, allow_all
from chorale.runtime.warmup.captures import Preparation

if TYPE_CHECKING:
    from chorale.kernels.triton.precompile.compiler import Precompiler

LAYERS = 2  # one of each cache group


def dry_run(
    precompiler: Precompiler,
    captured: LocalExecutor,
    preparations: Iterable[Preparation],
    launched: Iterable[tuple[LocalExecutor, Iterable[StepPlan]]],
) -> int:
    """Records the kernels of all preparations (those of start-up first) and of each executor's plans.

    ``captured`` runs steps as a capture would, ``launched`` kernel by kernel. Returns how many kernels the
    engine needs before it is ready. Raises ``EngineError``.
    """
    needed = 0
    for action, is_first in sorted(preparations, key=lambda preparation: not preparation[1]):
        with precompiler.recording():
            captured.prepare(action)
        if is_first:
            needed = precompiler.num_kernels
    for executor, plans in launched:
        for plan in plans:
            with precompiler.recording():
                executor.execute(plan)()
    return needed or precompiler.num_kernels


def first_layers(model: GptOss) -> GptOss:
    """Returns the model with only ``LAYERS`` layers, and the first with each other window and number of
    experts; the weights are shared."""
    found, seen = copy.copy(model), set[tuple[str, int]]()
    found.layers = []
    for number, layer in enumerate(model.layers):
        kinds = {("window", layer[-1]), ("experts", model.config.experts_in(number))}
        if number < LAYERS or not kinds <= seen:
            found.layers.append(layer)
        seen |= kinds
    return found


def uncaptured(device: Device) -> Device:
    """Return a device that runs steps instead of capturing them. Otherwise like ``device``."""
    return cast(Device, _UncapturedDevice(device))


class _UncapturedDevice:
    def __init__(self, device: Device) -> None:
        self._device = device

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)

    def capture(self, step: Callable[[], None]) -> Callable[[], None]:
        step()
        return _nothing  # returning the step would keep its owner's memory alive


def _nothing() -> None:
    return None


class AllowAllGrammars(GrammarRows):
    """Gives every row a grammar that allows every token, without compiling one."""

    def allowed(
        self, rows: npt.NDArray[np.int32], drafts: npt.NDArray[np.int32] | None = None
    ) -> Allowed | None:
        return allow_all(self._device, np.arange(len(rows)), len(rows))
