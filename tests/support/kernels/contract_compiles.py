"""A script of ``test_contract.py``: records kernels and compiles them for Hopper, without a device.

It prints its observations as JSON: keys, and what became of two kernels (one of them in Gluon) that a pool of
processes compiled.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.runtime.cache import triton_key

from chorale.kernels.triton.attention import invariant
from chorale.kernels.triton.dense.norm import rms_norm
from chorale.kernels.triton.precompile.compiler import Precompiler
from chorale.kernels.triton.precompile.pool import CompilePool
from chorale.kernels.triton.precompile.worker_main import settle_keys
from tests.support.kernels.dry_run_steps import pretend


@gluon.jit
def gluon_kernel(out_ptr, LAYOUT: gl.constexpr):
    gl.store(out_ptr + gl.arange(0, 128, LAYOUT), gl.full([128], 1.0, gl.float32, LAYOUT))


FIRSTS = ("_tiles_kernel", "_join_kernel")


def keys() -> list[list[str]]:
    """Returns the globals in a kernel's key, from processes that requested different kernels before."""
    found = []
    triton_key()  # which takes most of the time of each process, and is the same in all of them
    for first in FIRSTS:
        begin, end = os.pipe()
        if os.fork() == 0:
            settle_keys()
            kernel = invariant._join_kernel
            if getattr(invariant, first).cache_key and kernel.cache_key:
                os.write(end, json.dumps([name for name, _ in kernel.used_global_vals]).encode())
            os._exit(0)
        os.close(end)
        os.wait()
        found.append(json.loads(os.read(begin, 2**16)))
    return found


class Counting(Precompiler):
    """Counts what Triton asks for."""

    num_asked = 0

    def submit(self, *given: Any) -> Any:
        self.num_asked += 1
        return super().submit(*given)


def pooled(pool: CompilePool) -> list[int]:
    """Returns the numbers of kernels found, left to this process, and late, and of Triton's requests: it asks
    again for none that is in its cache."""
    pretend()
    precompiler = Counting(lambda: pool)
    for _ in range(2):
        with precompiler.recording():
            rms_norm(torch.zeros(4, 64), torch.zeros(64), 1e-5, torch.bfloat16)
            contract_compiles.gluon_kernel[(1,)](torch.zeros(128), gl.BlockedLayout([1], [32], [4], [0]))
        precompiler.wait(precompiler.num_kernels, lambda *_: None)
    return [precompiler.num_kernels, precompiler.num_here, precompiler.num_late, precompiler.num_asked]


if __name__ == "__main__":
    from tests.support.kernels import contract_compiles  # under the name that the processes use

    json.dump({"keys": keys(), "pooled": pooled(CompilePool(2))}, sys.stdout)
