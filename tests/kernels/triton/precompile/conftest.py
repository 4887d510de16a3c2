"""Triton's hook is a context variable: each test gives it back. And what compiles without a compiler."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest

if importlib.util.find_spec("triton") is None:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(autouse=True)
def context() -> Iterator[None]:
    from triton.runtime import _async_compile

    token = _async_compile.active_mode.set(None)
    yield
    _async_compile.active_mode.reset(token)
