"""Building the CPU library: without a compiler, with a wrong one, and what a stale library does."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from chorale.errors import ConfigError
from chorale.kernels import select_ops
from chorale.kernels.cpu import build, library


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where the library is looked for."""
    place = tmp_path / build.LIBRARY.name
    monkeypatch.setattr(library, "LIBRARY", place)
    library.library.cache_clear()
    yield place
    library.library.cache_clear()


def test_no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(build.BuildError, match="no C\\+\\+ compiler was found"):
        build.build(tmp_path / "made.so")
    monkeypatch.setenv("CXX", "/nowhere/c++ -O1")
    with pytest.raises(build.BuildError, match="CXX names /nowhere/c\\+\\+, which is not there"):
        build.build(tmp_path / "made.so")
    assert list(tmp_path.iterdir()) == []


def test_a_compiler_that_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CXX", shutil.which("false") or "false")
    with pytest.raises(build.BuildError, match="exit code 1"):
        build.build(tmp_path / "made.so")
    assert list(tmp_path.iterdir()) == []


def test_without_the_library_torch_computes(elsewhere: Path) -> None:
    assert select_ops("auto", "cpu").name == "reference"
    with pytest.raises(ConfigError, match="a C\\+\\+ compiler was missing"):
        select_ops("cpu", "cpu")


def test_a_damaged_library(elsewhere: Path) -> None:
    elsewhere.write_bytes(b"no library")
    assert "cannot be loaded" in library.library().why_not
    assert select_ops("auto", "cpu").name == "reference"


def test_a_library_of_other_sources(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not build.LIBRARY.exists():
        pytest.skip("the CPU kernels were not built")
    shutil.copy(build.LIBRARY, elsewhere)
    monkeypatch.setattr(library, "sources_digest", lambda: "another")
    assert "was built from other sources" in library.library().why_not


def test_an_instruction_set_that_is_not_there(monkeypatch: pytest.MonkeyPatch, elsewhere: Path) -> None:
    if not build.LIBRARY.exists():
        pytest.skip("the CPU kernels were not built")
    shutil.copy(build.LIBRARY, elsewhere)
    monkeypatch.setenv("CHORALE_CPU_ISA", "mmx")
    with pytest.raises(ConfigError, match="no such instruction set"):
        select_ops("cpu", "cpu")
