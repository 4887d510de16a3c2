"""Rehearsal: what kernels will steps launch? Every kind of step is played once, over two layers of the model.

Nothing is launched: the op set's compiler notes the kernels and compiles them in threads (``Ops.compiler``).
An executor of its own, with a pool of one block, plays the parts of the real one: its tensors have the same
shapes, types and alignments, by which kernels are told apart, and are gone afterwards.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from chorale.engine.types import EngineLimits, RowStart, SamplingSpec, StepPlan
from chorale.kernels.ops import Compiler
from chorale.model.gpt_oss import GptOss
from chorale.runtime.device import Device
from chorale.runtime.executor import LocalExecutor
from chorale.runtime.sampling.grammar import GrammarRows, Masks, allow_all_masks
from chorale.runtime.steps.graph_sizes import row_sizes
from chorale.runtime.worker import Worker

_LAYERS = 2  # one of either kind
# Steps without a graph are of any size: their kernels are those of one of the two nearest of these.
_EAGER_SIZES = (*range(16, 128, 16), *range(128, 2048, 32), *range(2048, 8192 + 1, 1024))
Action = Callable[[Worker], None]


class UncapturedDevice:
    """A device that runs a step instead of capturing it, and forgets it. Everything else is the device's."""

    def __init__(self, device: Device) -> None:
        self._device = device

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)

    def capture(self, step: Callable[[], None]) -> Callable[[], None]:
        step()
        return _nothing  # not the step, which holds its owner's memory


def _nothing() -> None:
    return None


class AllowAllGrammars(GrammarRows):
    """Every row has a grammar, which allows every token; no compiler of grammars is asked."""

    def masks(self, rows: npt.NDArray[np.int32]) -> Masks | None:
        return allow_all_masks(self._device, len(rows))


def shortened(model: GptOss, layers: int = _LAYERS) -> GptOss:
    """The same model, cut off after some layers; shares its weights."""
    found = copy.copy(model)
    found.layers = model.layers[:layers]
    return found


@dataclass(frozen=True, slots=True)
class DryRunExecutors:
    """Who plays: steps as they are captured, and steps that are launched kernel by kernel."""

    captured: LocalExecutor
    launched: LocalExecutor
    masked: LocalExecutor  # as launched, and every row has a grammar


def dry_run(
    compiler: Compiler,
    executors: DryRunExecutors,
    pieces: Iterable[tuple[Action, bool]],
    plans: Iterable[StepPlan],
    masked: Iterable[StepPlan],
    first: StepPlan,
) -> int:
    """Play the ``first`` step, all ``pieces`` (and whether they are first), ``plans``, and ``masked`` steps.

    Returns how many kernels the first step and the first pieces need. Raises ``EngineError``.
    """
    with compiler.playing():
        executors.captured.execute(first).result()
    needed, ordered = 0, sorted(pieces, key=lambda piece: not piece[1])
    for action, is_first in ordered:
        with compiler.playing():
            executors.captured.prepare(action)
        if is_first:
            needed = compiler.num_kernels
    for plan in plans:
        with compiler.playing():
            executors.launched.execute(plan).result()
    for plan in masked:
        with compiler.playing():
            executors.masked.execute(plan).result()
    return needed or compiler.num_kernels


def eager_plans(limits: EngineLimits, graph_rows: Sequence[int]) -> Iterator[StepPlan]:
    """Steps that no graph takes: of any size, one prompt or several rows, with filters or without."""
    most, rows_most = limits.max_num_batched_tokens, limits.max_num_seqs
    for rows in row_sizes(rows_most):
        if not graph_rows or rows > graph_rows[-1]:
            yield eager_plan(rows, rows, limits, filtered=False)
    for rows in sorted({1, min(16, rows_most)}):
        yield eager_plan(rows, rows, limits, filtered=True)
    for rows in sorted({1, min(4, rows_most)}):  # in how many parts contexts are read depends on both
        for tokens in (16, 128, 256, 512, 1024):
            if tokens < most:
                yield eager_plan(tokens, rows, limits, filtered=False)
    for tokens in eager_sizes(most):
        rows = min(40, tokens, rows_most)
        yield eager_plan(min(tokens, rows * limits.max_model_len), rows, limits, filtered=False)


def masked_plans(limits: EngineLimits) -> Iterator[StepPlan]:
    """Sampling under a grammar: few rows or many, with filters or without."""
    for rows in sorted({1, min(16, limits.max_num_seqs)}):
        for filtered in (False, True):
            yield eager_plan(rows, rows, limits, filtered=filtered)


def eager_sizes(most: int) -> list[int]:
    """Tokens of steps without a graph, up to ``most``, that launch whatever such steps can launch."""
    return [*(size for size in _EAGER_SIZES if size < most), most]


def eager_plan(tokens: int, rows: int, limits: EngineLimits, *, filtered: bool) -> StepPlan:
    """So many tokens of new rows 0 ..., all in block 0: all but one row have a token each, if that can be."""
    spec = SamplingSpec(top_p=0.5) if filtered else SamplingSpec()
    new = np.ones(rows, np.int32)
    missing = tokens - rows
    for row in range(rows):
        more = min(missing, limits.max_model_len - 1)
        new[row] += more
        missing -= more
    one, none = np.zeros(1, np.int32), np.zeros(0, np.int32)
    eos = limits.eos_token_ids
    return StepPlan(
        step_id=-1,
        starts=tuple(RowStart(row, one, 1, spec, 0, eos) for row in range(rows)),
        rows=np.arange(rows, dtype=np.int32),
        num_computed=np.zeros(rows, np.int32),
        num_new=new,
        samples=np.ones(rows, np.bool_),
        token_ids=np.zeros(int(new.sum()), np.int32),
        append_row=none,
        append_group=none,
        append_index=none,
        append_block=none,
    )
