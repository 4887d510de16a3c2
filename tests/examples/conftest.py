"""One demo server for all examples, with greedy sampling so that the answers are known.

The served name is not "demo", so that an example works only if it asks the server for the name. The MCP
example needs a server that may call addresses of this machine.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.served import Served, serving

NAME = "some/model"
OPTIONS = (
    "--served-model-name",
    NAME,
    "--tool-allow-private-hosts",
    "--override-generation-config",
    '{"temperature": 0}',
)


@pytest.fixture(scope="package")
def example_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving("demo", tmp_path_factory.mktemp("examples"), *OPTIONS) as server:
        yield server
