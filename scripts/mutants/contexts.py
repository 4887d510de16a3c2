"""A plugin of pytest: labels coverage data with the id of the running test, and records test times.

Loaded by ``coverage_map`` with ``-p contexts``; writes ``MUTANTS_TIMES`` when the run ends.
"""

from __future__ import annotations

import json
import os
from collections.abc import Generator
from pathlib import Path

import pytest
from coverage import Coverage

_times: dict[str, float] = {}
_failed: set[str] = set()


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, None, None]:
    measuring = Coverage.current()
    if measuring is not None:
        measuring.switch_context(item.nodeid)
    yield
    if measuring is not None:
        measuring.switch_context("")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _times[report.nodeid] = _times.get(report.nodeid, 0.0) + report.duration
    if report.failed:
        _failed.add(report.nodeid)


def pytest_sessionfinish() -> None:
    passed = {test: seconds for test, seconds in _times.items() if test not in _failed}
    Path(os.environ["MUTANTS_TIMES"]).write_text(json.dumps({"passed": passed, "failed": sorted(_failed)}))
