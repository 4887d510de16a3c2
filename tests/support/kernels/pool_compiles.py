"""A script of ``test_pool.py``: two kernels, one of them Gluon's, compiled for Hopper by a pool."""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from chorale.kernels.triton.dense.norm import rms_norm
from chorale.kernels.triton.precompile.compiler import Precompiler
from chorale.kernels.triton.precompile.pool import CompilePool
from tests.support.kernels.dry_run_steps import pretend


@gluon.jit
def fill_kernel(out_ptr, LAYOUT: gl.constexpr):
    gl.store(out_ptr + gl.arange(0, 128, LAYOUT), gl.full([128], 1.0, gl.float32, LAYOUT))


def main() -> None:
    pool = CompilePool(2)
    pretend()
    precompiler = Precompiler(lambda: pool)
    with precompiler.recording():
        rms_norm(torch.zeros(4, 64), torch.zeros(64), 1e-5, torch.bfloat16)
        pool_compiles.fill_kernel[(1,)](torch.zeros(128), gl.BlockedLayout([1], [32], [4], [0]))
    precompiler.wait(precompiler.num_kernels, lambda *_: None)
    print("compiled", precompiler.num_kernels, "here", precompiler.num_here, "late", precompiler.num_late)


if __name__ == "__main__":
    from tests.support.kernels import pool_compiles  # as the processes know it

    main()
