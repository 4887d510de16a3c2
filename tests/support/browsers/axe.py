"""axe-core, the checker of accessibility, from its pinned npm package."""

from __future__ import annotations

import io
import subprocess
import tarfile
from functools import cache

import pytest

from scripts.vendor_docs_page import fetch
from tests.support.browsers.tab import Tab

VERSION = "4.14.1"
INTEGRITY = "sha512-FHfa+lmNjQZfJz1q8wKqIDwC6DExcHt/pkjNQb09a3NPjCKg2rhu5qb2S4r76ASyFNNtuFooJpZe37OgudVGtQ=="
_FIND = (
    "axe.run(document, {resultTypes: ['violations']}).then(found => found.violations.map("
    "each => each.id + ': ' + each.nodes.map(node => node.target.join(' ')).join(', ')))"
)


@cache
def source() -> str:
    """Returns the script. Skips the test if the package cannot be fetched."""
    try:
        package = fetch("axe-core", VERSION, INTEGRITY)
    except (OSError, subprocess.SubprocessError) as error:
        pytest.skip(f"axe-core cannot be fetched with npm: {error}")
    with tarfile.open(fileobj=io.BytesIO(package)) as files:
        found = files.extractfile("package/axe.min.js")
        assert found is not None
        return found.read().decode()


def violations(tab: Tab) -> list[str]:
    """Returns the rules that the page breaks, each with the elements that break it."""
    if not tab.value("typeof axe === 'object'"):
        tab.run(source())
    return list(tab.value(_FIND))
