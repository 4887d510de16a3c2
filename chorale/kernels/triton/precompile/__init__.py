"""Compiles kernels before they are launched. The only package that uses internals of Triton."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from chorale.kernels.triton.precompile.compiler import Precompiler
    from chorale.kernels.triton.precompile.pool import CompilePool


def make_precompiler(start_pool: Callable[[], CompilePool | None]) -> Precompiler:
    """``Ops.precompiler``. Raises ``ContractError`` if this does not work with the installed Triton."""
    from chorale.kernels.triton.precompile.contract import ContractError, check

    check()
    try:
        from chorale.kernels.triton.precompile import compiler
    except ImportError as error:
        raise ContractError(str(error)) from error
    return compiler.Precompiler(start_pool)
