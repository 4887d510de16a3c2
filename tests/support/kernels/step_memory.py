"""A script that counts the bytes which a step allocates on a GPU that need not be here.

    python -m tests.support.kernels.step_memory rtx-4080

Runs the largest steps of a 20b server on meta tensors; kernels are recorded and not compiled. Prints what
``lean_step_bytes`` plans, and the most that lived at once: a quarter less, as fragmentation takes memory too,
and logits do not live together with the experts' work.
"""

from __future__ import annotations

import sys
import weakref
from dataclasses import replace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from chorale.config.engine import EngineConfig
from chorale.kernels.triton.precompile.target import compiled_for
from chorale.machine.gpus import find_gpu, hardware_of
from chorale.model.config_writer import SHAPES, make_config
from chorale.runtime.build_worker import make_worker
from chorale.runtime.executor import LocalExecutor
from chorale.runtime.sampling.grammar import GrammarCache, GrammarRows
from chorale.runtime.sizing.memory import lean_step_bytes
from chorale.runtime.warmup.dry_run import first_layers
from chorale.runtime.warmup.plans import eager_plan
from chorale.serve.engine.warm import Target, shapes_of
from tests.support.kernels.compile_kernels import Recorder


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of meta tensors while they live, in the units of PyTorch's allocator."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.most = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in tree_leaves((args, kwargs)):
            self._see(tensor, is_new=False)  # a view of weights is no allocation
        result = op(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            self._see(tensor, is_new=True)
        return result

    def _see(self, tensor: Any, *, is_new: bool) -> None:
        if not isinstance(tensor, torch.Tensor) or tensor.device.type != "meta":
            return
        storage = tensor.untyped_storage()
        key, size = storage._cdata, -(-storage.nbytes() // 512) * 512 if is_new else 0
        if key in self._known:
            return
        self._known.add(key)
        self.live += size
        self.most = max(self.most, self.live)
        weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.live -= size


def main(gpu_name: str) -> None:
    gpu, model = find_gpu(gpu_name), make_config(**SHAPES["20b"])
    target = Target(hardware_of(gpu), gpu.architecture, gpu.multiprocessors)
    with compiled_for(target.architecture, target.multiprocessors), LiveBytes() as counted:
        shapes = shapes_of(EngineConfig(model="20b", max_model_len=32768), model, target, None)
        limits, device, most = shapes.resolved.limits, shapes.device, 0
        eager = replace(shapes.resolved, graph_rows=(), limits=replace(limits, num_blocks=1))
        rows = GrammarRows(device, GrammarCache(model.vocab_size))
        executor = LocalExecutor(make_worker(first_layers(shapes.model), eager, device, rows))
        for count in (1, limits.max_num_seqs):
            plan = eager_plan(limits.max_num_batched_tokens, count, limits, filtered=True)
            before = counted.most = counted.live
            with Recorder().recording():
                executor.execute(plan)()
            most = max(most, counted.most - before)
    planned = lean_step_bytes(model, limits.max_num_batched_tokens, limits.max_num_seqs)
    print(f"planned {planned}, counted {most}")
    assert 0.4 * planned < most <= 0.75 * planned


if __name__ == "__main__":
    main(sys.argv[1])
