"""The shared library of CPU ops, loaded once per process.

``CHORALE_CPU_ISA`` selects an instruction set instead of the processor's best (amx, avx512_vnni, avx_vnni,
avx2, neon_dotprod, generic). Calls release the GIL.
"""

from __future__ import annotations

import ctypes
import functools
import os
from ctypes import CFUNCTYPE, POINTER, Structure, c_char_p, c_float, c_int, c_int32, c_int64, c_void_p
from dataclasses import dataclass
from typing import Any, ClassVar

from chorale.kernels.cpu.build import LIBRARY, sources_digest

FLOAT32, BFLOAT16, INT8, MXFP4 = range(4)  # ``Element`` in native/table.h


class Matrix(Structure):
    """``Matrix`` in native/table.h."""

    _fields_: ClassVar[Any] = [
        ("data", c_void_p), ("scales", c_void_p), ("bias", c_void_p), ("rows", c_int64), ("columns", c_int64),
        ("element", c_int32), ("exact", c_int32), ("fixed", c_int32), ("stride", c_int32),
    ]  # fmt: skip


class Experts(Structure):
    """``Experts`` in native/table.h."""

    _fields_: ClassVar[Any] = [
        ("gate_up", Matrix), ("down", Matrix), ("num_experts", c_int64), ("limit", c_float),
        ("alpha", c_float), ("ends", c_void_p), ("num_parts", c_int64),
    ]  # fmt: skip


class Step(Structure):
    """``Step`` in native/table.h."""

    _fields_: ClassVar[Any] = [
        ("query_start", c_void_p), ("context_lens", c_void_p), ("block_table", c_void_p), ("slots", c_void_p),
        ("num_rows", c_int64), ("width", c_int64), ("block_size", c_int64), ("heads", c_int64),
        ("kv_heads", c_int64), ("head_dim", c_int64), ("window", c_int64),
        ("rounded", c_int64),
    ]  # fmt: skip


class Sampling(Structure):
    """``Sampling`` in native/table.h."""

    _fields_: ClassVar[Any] = [
        ("logits", c_void_p), ("keys", c_void_p), ("temperature", c_void_p), ("forbidden", c_void_p),
        ("allowed_index", c_void_p), ("allowed", c_void_p), ("early_stops", c_void_p), ("filters", c_void_p),
        ("rows", c_int64), ("columns", c_int64), ("allowed_stride", c_int64), ("stops_stride", c_int64),
    ]  # fmt: skip


_P, _N, _E, _F = c_void_p, c_int64, c_int32, c_float


class Functions(Structure):
    """``Table`` in native/table.h."""

    _fields_: ClassVar[Any] = [
        ("name", c_char_p),
        ("packed_bytes", CFUNCTYPE(_N, _N)),
        ("pack", CFUNCTYPE(None, _P, _E, _N, _N, _P)),
        ("linear", CFUNCTYPE(None, _P, _N, _P, _F, _P, _P, _E)),
        ("rotate_and_cache", CFUNCTYPE(None, _P, _N, _P, _P, _P, _E, _P)),
        ("attention", CFUNCTYPE(None, _P, _P, _E, _P, _P, _P)),
        ("route", CFUNCTYPE(None, _P, _N, _N, _P, _F, _P, _P, _N, _N, _P, _P, _P)),
        ("moe", CFUNCTYPE(None, _P, _N, _N, _P, _P, _N, _P, _P)),
        ("sample", CFUNCTYPE(None, _P, _P)),
    ]


@dataclass(frozen=True, slots=True)
class Library:
    """The functions of one instruction set; ``why_not`` is the reason if there are none."""

    functions: Any
    name: str
    why_not: str = ""
    set_threads: Any = None  # (number of threads, their processors or None); called by threads.py


@functools.cache
def library() -> Library:
    """Loads the library. It is missing if there was no compiler at the installation."""
    if not LIBRARY.exists():
        return Library(None, "", "they were not built: a C++ compiler was missing at the installation")
    try:
        loaded = ctypes.CDLL(str(LIBRARY))
    except OSError as error:
        return Library(None, "", f"{LIBRARY.name} cannot be loaded: {error}")
    loaded.chorale_cpu_sources.restype = c_char_p
    if loaded.chorale_cpu_sources().decode() != sources_digest():
        again = "python -m chorale.kernels.cpu.build"
        return Library(None, "", f"{LIBRARY.name} was built from other sources; {again} builds it again")
    loaded.chorale_cpu_table.restype = POINTER(Functions)
    loaded.chorale_cpu_table.argtypes = [c_char_p]
    asked = os.environ.get("CHORALE_CPU_ISA")
    table = loaded.chorale_cpu_table(asked.encode() if asked else None)
    if not table:
        return Library(None, "", f"CHORALE_CPU_ISA={asked}: this processor has no such instruction set")
    loaded.chorale_cpu_threads.argtypes = [c_int, POINTER(c_int)]
    return Library(table.contents, table.contents.name.decode(), set_threads=loaded.chorale_cpu_threads)
