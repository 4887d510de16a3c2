"""The features of the demo's tokens, which take most of the time of an expansion, computed once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

import pytest

from chorale.model.demo.features import Parts, feature_parts


@contextmanager
def features_once(*modules: ModuleType) -> Iterator[None]:
    """Lets ``modules`` use the features of the first tokens that they ask for again."""
    found: list[tuple[list[bytes], Parts]] = []

    def kept(token_bytes: list[bytes]) -> Parts:
        if not found:
            found.append((token_bytes, feature_parts(token_bytes)))
        tokens, parts = found[0]
        return parts if tokens == token_bytes else feature_parts(token_bytes)

    with pytest.MonkeyPatch.context() as patch:
        for module in modules:
            patch.setattr(module, "feature_parts", kept)
        yield
