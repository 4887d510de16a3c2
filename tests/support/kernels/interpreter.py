"""Triton's interpreter, made quicker."""

from __future__ import annotations

import inspect
from typing import Any

from triton.language.core import is_builtin
from triton.runtime import interpreter


def find_builtins_once() -> None:
    """Have the interpreter keep the names of the functions that it replaces.

    It looks through all of ``triton.language`` for them at each call of a jitted function from another. Which
    ones they are does not change; those that are replaced already are not builtin, and stay as they are.
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
