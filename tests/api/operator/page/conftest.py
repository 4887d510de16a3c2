"""The page's tests run in each browser that the machine has, in Firefox with `make test-all` only."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.browsers import chromium, firefox
from tests.support.browsers.tab import SIZE, Tab

_BROWSERS = {"chromium": (chromium.PATH, chromium.Page), "firefox": (firefox.PATH, firefox.Firefox)}


# Ends when the worker leaves these tests: an idle browser takes CPU time.
@pytest.fixture(scope="package", params=["chromium", pytest.param("firefox", marks=pytest.mark.slow)])
def browser(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    path, kind = _BROWSERS[request.param]
    if path is None:
        pytest.skip(f"there is no {request.param} on this machine")
    found = kind(tmp_path_factory.mktemp(request.param))
    yield found
    found.close()


@pytest.fixture
def tab(browser: Tab) -> Iterator[Tab]:
    """The browser's tab, at the usual size and in light colours."""
    yield browser
    browser.resize(*SIZE)
    browser.darken(False)
