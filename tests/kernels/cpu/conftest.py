"""The choice of an instruction set with tiles."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from chorale.kernels.cpu.library import library

Use = Callable[[str], None]


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Iterator[Use]:
    """Chooses an instruction set for what is made next; at first ``amx``."""

    def choose(name: str) -> None:
        monkeypatch.setenv("CHORALE_CPU_ISA", name)
        library.cache_clear()

    monkeypatch.delenv("CHORALE_CPU_ISA", raising=False)
    library.cache_clear()
    if library().functions is None:
        pytest.skip(library().why_not)
    choose("amx")
    if library().functions is None:
        why_not = library().why_not
        library.cache_clear()
        pytest.skip(why_not)
    yield choose
    library.cache_clear()
