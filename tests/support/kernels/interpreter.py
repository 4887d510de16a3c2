"""Speed-ups of Triton's interpreter, which looks up the same things for every call of every program."""

from __future__ import annotations

import functools
import inspect
import math
from typing import Any

import numpy as np
import triton.language as tl
from triton.language.core import is_builtin
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter


def look_up_once() -> None:
    """Halve the interpreter's time. What kernels compute stays the same."""
    _find_builtins_once()
    _call_builtins_directly()
    _patch_once_a_grid()
    _find_dtypes_once()
    _make_types_once()
    _compare_types_by_identity()
    _leave_out_idle_overflow_checks()


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


def _call_builtins_directly() -> None:
    """Call what a builtin wraps. The wrapper only demands an argument that the interpreter always adds."""
    wrapper, semantic = tl.core.builtin(lambda: None).__code__, interpreter.interpreter_semantic

    def patch(package: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        is_wrapped = getattr(member, "__code__", None) is wrapper
        function = member.__wrapped__ if is_wrapped else member

        def call(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = semantic
            return function(*args, **kwargs)

        scope.set_attr(package, name, call)

    interpreter._patch_attr = patch


def _patch_once_a_grid() -> None:
    """Replace the language's functions once for each grid, not again whenever a jitted function calls another
    of the same modules."""
    replace_functions, modules = interpreter._patch_lang, {id(tl), id(tl.core)}
    visible_to: dict[Any, set[int]] = {}
    replaced: set[int] = set()

    class Scope(interpreter._LangPatchScope):
        def restore(self) -> None:
            super().restore()
            replaced.clear()

    def patch(function: Any) -> Any:
        if function not in visible_to:
            visible_to[function] = modules.intersection(map(id, function.__globals__.values()))
        visible = visible_to[function]
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
    """Cache the types of blocks, and the shapes of tensors. The interpreter makes and names them for each
    operand. Blocks of one shape then have the same object as their shape."""
    make = tl.core.block_type.__init__
    made: dict[Any, dict[str, Any]] = {}
    sizes_of_shape: dict[int, tuple[int, ...]] = {}  # by the ids of the cached shapes, which stay
    shapes: dict[tuple[int, ...], Any] = {}
    sizes_of_tensor: dict[int, Any] = {}  # number of elements and shape, by the id of the block's shape
    of_scalar = tl.constexpr(1), tl.tuple([])

    def init(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = sizes_of_shape.get(id(shape))
        if sizes is None:
            sizes = tuple([getattr(size, "value", size) for size in shape])
        key = element_ty.name, sizes
        if key not in made:
            make(self, element_ty, shape)
            self.shape = shapes.setdefault(sizes, self.shape)
            sizes_of_shape[id(self.shape)] = sizes
            constants = tl.tuple([tl.constexpr(size) for size in sizes])
            sizes_of_tensor[id(self.shape)] = tl.constexpr(math.prod(sizes)), constants
            made[key] = dict(vars(self))
        vars(self).update(made[key])

    def init_tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = sizes_of_tensor[id(type.shape)] if type.is_block() else of_scalar

    tl.core.block_type.__init__ = init
    tl.core.tensor.__init__ = init_tensor


def _compare_types_by_identity() -> None:
    """Find that types and shapes are equal without comparing their names and sizes."""
    equal, broadcast = tl.core.dtype.__eq__, TritonSemantic.broadcast_impl_value

    @functools.wraps(equal)
    def is_equal(self: Any, other: Any) -> bool:
        return self is other or bool(equal(self, other))

    @functools.wraps(broadcast)
    def broadcast_if_unequal(self: Any, left: Any, right: Any) -> Any:
        one, other = left.type, right.type
        if one.is_block() and other.is_block() and one.shape is other.shape:
            return left, right
        return broadcast(self, left, right)

    tl.core.dtype.__eq__ = is_equal
    TritonSemantic.broadcast_impl_value = broadcast_if_unequal


def _leave_out_idle_overflow_checks() -> None:
    """Compute sums and products of integers once. The interpreter computes each again in 64 bits, and passes
    the comparison to an assertion that does nothing without the option debug."""
    check = TritonSemantic.binary_op_sanitize_overflow_impl

    @functools.wraps(check)
    def check_if_read(self: Any, *args: Any) -> None:
        if self.builder.options.debug:
            check(self, *args)

    TritonSemantic.binary_op_sanitize_overflow_impl = check_if_read
