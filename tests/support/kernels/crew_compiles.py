"""A script of ``test_crew.py``: two kernels, one of them Gluon's, compiled for Hopper by a crew."""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from chorale.kernels.triton.dense.norm import rms_norm
from chorale.kernels.triton.precompile.compiler import Compiling
from chorale.kernels.triton.precompile.pool import Crew
from tests.support.kernels.rehearse_steps import pretend


@gluon.jit
def fill_kernel(out_ptr, LAYOUT: gl.constexpr):
    gl.store(out_ptr + gl.arange(0, 128, LAYOUT), gl.full([128], 1.0, gl.float32, LAYOUT))


def main() -> None:
    crew = Crew(2)
    pretend()
    compiler = Compiling(2, lambda: crew)
    with compiler.playing():
        rms_norm(torch.zeros(4, 64), torch.zeros(64), 1e-5, torch.bfloat16)
        crew_compiles.fill_kernel[(1,)](torch.zeros(128), gl.BlockedLayout([1], [32], [4], [0]))
    compiler.wait(compiler.num_kernels, lambda *_: None)
    print("compiled", compiler.num_kernels, "here", compiler.num_here, "late", compiler.num_late)


if __name__ == "__main__":
    from tests.support.kernels import crew_compiles  # as the processes know it

    main()
