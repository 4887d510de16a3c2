"""The undocumented parts of Triton that this package relies on; ``check`` verifies that they exist.

It checks names and signatures, in milliseconds, before anything is replaced. The behaviour of compilations is
tested in ``tests/kernels/triton/precompile/test_contract.py``. ``docs/explanation/kernels.md`` lists the
versions with which both were run.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from types import CodeType
from typing import Any

ARGUMENTS = ("src", "target", "options", "env_vars")  # free variables of Triton's compile function
_NAMES = {
    "triton": ("__version__", "compile"),
    "triton.backends.compiler": ("GPUTarget",),
    "triton.backends.nvidia.driver": ("CudaLauncher", "CudaUtils"),
    "triton.runtime": ("driver",),
    "triton.runtime._async_compile": ("AsyncCompileMode", "active_mode"),
    "triton.runtime.cache": ("FileCacheManager", "get_cache_manager", "triton_key"),
    "triton.runtime.jit": ("JITFunction",),
    "triton.experimental.gluon._runtime": ("GluonJITFunction",),
}


class ContractError(RuntimeError):
    """Kernels cannot be precompiled with this version of Triton."""


def check() -> None:
    """Raises ``ContractError`` with a list of all changed parts."""
    changed = list(_missing()) or list(_changed())
    if changed:
        import triton

        version = getattr(triton, "__version__", "of an unknown version")
        raise ContractError(f"Triton {version} differs from what precompilation needs: {'; '.join(changed)}")


def compile_arguments(compile_: Callable[[], Any]) -> dict[str, Any]:
    """Return the arguments of ``triton.compile``, from the function in which Triton calls it.

    Raises ``AttributeError`` or ``KeyError`` if that function has another form.
    """
    cells: Any = compile_.__closure__
    names = compile_.__code__.co_freevars
    found = {name: cell.cell_contents for name, cell in zip(names, cells, strict=True)}
    return {name: found[name] for name in ARGUMENTS}


def _missing() -> Iterator[str]:
    for module, names in _NAMES.items():
        try:
            found = importlib.import_module(module)
        except ImportError as error:
            yield f"{module} cannot be imported ({error})"
            continue
        yield from (f"{module}.{name} is missing" for name in names if not hasattr(found, name))


def _changed() -> Iterator[str]:
    import triton
    from triton.experimental.gluon._runtime import GluonJITFunction
    from triton.runtime import _async_compile
    from triton.runtime.cache import FileCacheManager
    from triton.runtime.jit import JITFunction

    yield from _lacks(JITFunction.run, "grid", "warmup")
    yield from _lacks(triton.compile, "src", "target", "options", "_env_vars")
    yield from _lacks(_async_compile.AsyncCompileMode.submit, "key", "compile_fn", "finalize_fn")
    if GluonJITFunction.run is not JITFunction.run:
        yield "GluonJITFunction has its own run"
    if not isinstance(_async_compile.active_mode, ContextVar):
        yield "active_mode is not a context variable"
    if not isinstance(inspect.getattr_static(JITFunction, "cache_key", None), property):
        yield "JITFunction.cache_key is not a property"
    for name in ("get_file", "put"):
        if not hasattr(FileCacheManager, name):
            yield f"FileCacheManager has no {name}"
    closed_over = _free_variables(getattr(JITFunction, "_do_compile", None), "async_compile")
    if missing := [name for name in ARGUMENTS if name not in closed_over]:
        yield f"JITFunction._do_compile.async_compile does not close over {', '.join(missing)}"


def _lacks(function: Callable[..., Any], *names: str) -> Iterator[str]:
    found = inspect.signature(function).parameters
    shown = getattr(function, "__qualname__", str(function))
    yield from (f"{shown} has no parameter {name}" for name in names if name not in found)


def _free_variables(outer: Any, inner: str) -> tuple[str, ...]:
    """Returns the free variables of the function ``inner`` that ``outer`` defines."""
    constants = getattr(getattr(outer, "__code__", None), "co_consts", ())
    return next((c.co_freevars for c in constants if isinstance(c, CodeType) and c.co_name == inner), ())
