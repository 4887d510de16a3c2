"""A script of ``test_contract.py``: one kernel, recorded and then compiled, and what could be seen."""

from __future__ import annotations

import base64
import hashlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.runtime import _async_compile
from triton.runtime.cache import get_cache_manager

from chorale.kernels.triton.precompile.contract import compile_arguments


@triton.jit
def fill_kernel(out_ptr, BLOCK: tl.constexpr):
    tl.store(out_ptr + tl.arange(0, BLOCK), tl.zeros((BLOCK,), tl.float32))


class Mode:
    """Keeps what Triton submits."""

    def __init__(self) -> None:
        self.submitted: list[tuple[Any, ...]] = []
        self.stand_in = SimpleNamespace(result=self._launch, run=self._launch)
        self.launched: list[str] = []

    def submit(self, *arguments: Any) -> Any:
        self.submitted.append(arguments)
        return self.stand_in

    def _launch(self, *_: Any) -> Any:
        self.launched.append("launch")


def main() -> None:
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
    found = {
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
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
