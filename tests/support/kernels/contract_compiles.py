"""A script of ``test_contract.py``: records kernels and compiles them for Hopper, without a device.

It prints its observations as JSON: keys, one kernel compiled in this process, and two (one of them in Gluon)
compiled by a pool of processes.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.runtime import _async_compile
from triton.runtime.cache import get_cache_manager

from chorale.kernels.triton.attention import invariant
from chorale.kernels.triton.dense.norm import rms_norm
from chorale.kernels.triton.precompile.compiler import Precompiler
from chorale.kernels.triton.precompile.contract import compile_arguments
from chorale.kernels.triton.precompile.pool import CompilePool
from chorale.kernels.triton.precompile.worker_main import settle_keys
from tests.support.kernels.dry_run_steps import pretend


@triton.jit
def fill_kernel(out_ptr, BLOCK: tl.constexpr):
    tl.store(out_ptr + tl.arange(0, BLOCK), tl.zeros((BLOCK,), tl.float32))


class Mode:
    """Records what Triton submits."""

    def __init__(self) -> None:
        self.submitted: list[tuple[Any, ...]] = []
        self.stand_in = SimpleNamespace(result=self._launch, run=self._launch)
        self.launched: list[str] = []

    def submit(self, *arguments: Any) -> Any:
        self.submitted.append(arguments)
        return self.stand_in

    def _launch(self, *_: Any) -> Any:
        self.launched.append("launch")


@gluon.jit
def gluon_kernel(out_ptr, LAYOUT: gl.constexpr):
    gl.store(out_ptr + gl.arange(0, 128, LAYOUT), gl.full([128], 1.0, gl.float32, LAYOUT))


FIRSTS = ("_tiles_kernel", "_join_kernel")


def keys() -> list[list[str]]:
    """Returns the globals in a kernel's key, from processes that requested different kernels before."""
    found = []
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


def pooled(pool: CompilePool) -> list[int]:
    """Returns the numbers of kernels found, left to this process, and late."""
    pretend()
    precompiler = Precompiler(lambda: pool)
    with precompiler.recording():
        rms_norm(torch.zeros(4, 64), torch.zeros(64), 1e-5, torch.bfloat16)
        contract_compiles.gluon_kernel[(1,)](torch.zeros(128), gl.BlockedLayout([1], [32], [4], [0]))
    precompiler.wait(precompiler.num_kernels, lambda *_: None)
    return [precompiler.num_kernels, precompiler.num_here, precompiler.num_late]


def seen_of_one() -> dict[str, Any]:
    triton.runtime.driver.set_active(
        SimpleNamespace(
            get_current_target=lambda: GPUTarget("cuda", 90, 32),
            get_current_device=lambda: 0,
            get_current_stream=lambda device: 0,
        )
    )
    mode = Mode()
    _async_compile.active_mode.set(mode)  # type: ignore[arg-type]
    tensor = torch.empty(128, device="meta")
    fill_kernel.run(tensor, 128, grid=(1,), warmup=True)
    key, compile_, finalize, *_ = mode.submitted[0]
    finalize("kept")
    kept = [cache for cache, *_ in fill_kernel.device_caches.values() if "kept" in cache.values()]
    fill_kernel.run(tensor, 128, grid=(1,), warmup=True)
    kernel = compile_()
    hash_ = hashlib.sha256(key.encode()).hexdigest()
    file = f"__grp__{kernel.src.name}.json"
    folder = Path(get_cache_manager(hash_).get_file(file) or ".").parent
    return {
        "submitted": len(mode.submitted),
        "asked again": len(mode.submitted),
        "launched": mode.launched,
        "finalized": bool(kept),
        "arguments": sorted(compile_arguments(compile_)),
        "hash": kernel.hash,
        "sha256 of the key": hash_,
        "file": file,
        "folder": sorted(path.name for path in folder.iterdir()),
        "folder name": folder.name,
        "base32 of the hash": base64.b32encode(bytes.fromhex(hash_)).decode().rstrip("="),
        "name": kernel.src.name,
        "metadata": kernel.metadata.name,
    }


if __name__ == "__main__":
    from tests.support.kernels import contract_compiles  # under the name that the processes use

    json.dump({"keys": keys(), "pooled": pooled(CompilePool(2)), "one": seen_of_one()}, sys.stdout)
