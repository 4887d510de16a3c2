"""Runs tests that are coroutine functions."""

from __future__ import annotations

import asyncio
import inspect

import pytest

from tests.support import PATIENCE


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Runs a coroutine function on an event loop of its own, by ``RUN`` of its module or ``asyncio.run``."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    values = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    run = getattr(pyfuncitem.module, "RUN", asyncio.run)
    run(asyncio.wait_for(pyfuncitem.obj(**values), PATIENCE))
    return True
