"""ProfilerConfig: where traces are written and what they contain."""

from __future__ import annotations

from typing import Literal

import msgspec


class ProfilerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The operator's choice, with names and defaults of vLLM's ``--profiler-config``."""

    torch_profiler_dir: str
    profiler: Literal["torch"] = "torch"
    torch_profiler_with_stack: bool = True
    torch_profiler_with_flops: bool = False
    torch_profiler_record_shapes: bool = False
    torch_profiler_with_memory: bool = False
    torch_profiler_use_gzip: bool = True
