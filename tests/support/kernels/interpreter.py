"""A speed-up of Triton's interpreter."""

from __future__ import annotations

import inspect
from typing import Any

from triton.language.core import is_builtin
from triton.runtime import interpreter


def find_builtins_once() -> None:
    """Make the interpreter cache the names of the functions that it replaces.

    It searches all of ``triton.language`` for them whenever a jitted function calls another. The names never
    change; functions that are already replaced are not builtin, and are left alone.
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
