"""The note that a start's kernels are all on disk: when it holds, and everything that makes it worthless."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from triton.runtime.cache import get_cache_manager

import chorale
from chorale.kernels.triton.precompile import manifest
from chorale.kernels.triton.precompile.compiler import Precompiler
from chorale.kernels.triton.precompile.manifest import CompileManifest, is_cached
from chorale.kernels.triton.precompile.pool import MANIFESTS
from chorale.serve.engine.compile_phase import SOURCES
from tests.support.kernels.fake_kernel import kernel

FACTS, GPU = "20b, 64 rows", torch.device("meta")
ROOTS = (Path("kernels"), Path("runtime"))


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty disk cache, and a machine with a Hopper GPU."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.chdir(make_sources(tmp_path / "sources"))
    set_target(monkeypatch, 90)
    return tmp_path / "cache"


def make_sources(folder: Path) -> Path:
    for name in ("kernels/triton/dense/norm.py", "runtime/sizing/graph_sizes.py"):
        (folder / name).parent.mkdir(parents=True)
        (folder / name).write_text("x = 1\n")
    return folder


def set_target(monkeypatch: pytest.MonkeyPatch, arch: int) -> None:
    monkeypatch.setattr(manifest, "architecture_of", lambda device: (f"sm_{arch}", 132))


def put_kernel(key: str) -> tuple[str, str]:
    """On disk, as Triton leaves it."""
    import hashlib

    hash_ = hashlib.sha256(key.encode()).hexdigest()
    get_cache_manager(hash_).put_group("norm.json", {})
    assert is_cached(key, "norm")
    return hash_, "norm"


def written() -> CompileManifest:
    found = CompileManifest(FACTS, GPU, ROOTS)
    found.write([put_kernel("a"), put_kernel("b")])
    return found


def test_a_mark_that_was_written_holds() -> None:
    assert not CompileManifest(FACTS, GPU, ROOTS).is_valid()
    written()
    assert CompileManifest(FACTS, GPU, ROOTS).is_valid()


CHANGES: dict[str, Callable[[pytest.MonkeyPatch], object]] = {
    "another GPU": lambda patch: set_target(patch, 80),
    "another Triton": lambda patch: patch.setattr(triton, "__version__", "9.9"),
    "another torch": lambda patch: patch.setattr(torch, "__version__", "9.9"),
    "a setting of Triton's": lambda patch: patch.setenv("TRITON_DEFAULT_FP_FUSION", "0"),
    "another kernel": lambda _: Path("kernels/triton/dense/norm.py").write_text("x = 2\n"),
    "a new kernel": lambda _: Path("kernels/new.py").write_text(""),
    "other sizes": lambda _: Path("runtime/sizing/graph_sizes.py").write_text("sizes = 1\n"),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_it_does_not_hold_after(
    change: Callable[[pytest.MonkeyPatch], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    written()
    change(monkeypatch)
    assert not CompileManifest(FACTS, GPU, ROOTS).is_valid()


def test_it_does_not_hold_for_another_start() -> None:
    written()
    assert not CompileManifest("120b, 64 rows", GPU, ROOTS).is_valid()


def test_it_does_not_hold_without_one_of_its_kernels(cache: Path) -> None:
    written()
    folder = Path(get_cache_manager(put_kernel("b")[0]).get_file("__grp__norm.json") or "").parent
    shutil.rmtree(folder)
    assert not CompileManifest(FACTS, GPU, ROOTS).is_valid()


def test_it_goes_with_the_cache(cache: Path) -> None:
    written()
    shutil.rmtree(cache)
    assert not CompileManifest(FACTS, GPU, ROOTS).is_valid()


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", "null", '{"key": 1}', '{"key": "KEY"}', '{"key": "KEY", "kernels": []}',
     '{"key": "KEY", "kernels": [["ab"]]}', '{"key": "KEY", "kernels": 5}',
     '{"key": "KEY", "kernels": [[1, 2]]}'],
)  # fmt: skip
def test_a_broken_one_does_not_hold(content: str) -> None:
    mark = written()
    path = Path(get_cache_manager(MANIFESTS).get_file(f"{mark._key}.json") or "")
    assert json.loads(path.read_text())["kernels"]
    path.write_text(content.replace("KEY", mark._key))
    assert not CompileManifest(FACTS, GPU, ROOTS).is_valid()
    path.write_bytes(b"\xff\x00")
    assert not CompileManifest(FACTS, GPU, ROOTS).is_valid()


def play(*names: str, fails: bool = False) -> Precompiler:
    compiler = Precompiler()
    assert not compiler.is_cached(FACTS, GPU, ROOTS)
    with compiler.recording():
        for name in names:
            compiler.submit(name, maker(name, fails), lambda _: None)
    compiler.wait(1, lambda *_: None)
    return compiler


def maker(name: str, fails: bool = False) -> Callable[[], Any]:
    def compile_() -> Any:
        if fails:
            raise RuntimeError("no such instruction")
        return kernel("norm", put_kernel(name)[0])

    return compile_


def is_written_soon(seconds: float = 5.0) -> bool:
    end = time.monotonic() + seconds
    while not CompileManifest(FACTS, GPU, ROOTS).is_valid() and time.monotonic() < end:
        time.sleep(0.01)
    return CompileManifest(FACTS, GPU, ROOTS).is_valid()


def test_a_start_whose_kernels_all_compile_leaves_a_valid_manifest() -> None:
    compiler = play("a", "b", "c")
    compiler.throttle()  # what is not needed first is compiled beside steps
    assert is_written_soon()
    assert Precompiler().is_cached(FACTS, GPU, ROOTS)


def test_a_failed_kernel_leaves_no_valid_manifest() -> None:
    play("a", fails=True).throttle()
    assert not is_written_soon(0.5)


def test_an_interrupted_recording_writes_no_manifest() -> None:
    compiler = Precompiler()
    assert not compiler.is_cached(FACTS, GPU, ROOTS)
    with compiler.recording():
        compiler.submit("a", maker("a"), lambda _: None)
    compiler.throttle()  # a later piece could not be played
    assert not is_written_soon(0.5)


def test_a_known_start_installs_nothing() -> None:
    from triton.runtime import _async_compile

    play("a").throttle()
    assert is_written_soon()
    _async_compile.active_mode.set(None)
    assert Precompiler().is_cached(FACTS, GPU, ROOTS)
    assert _async_compile.active_mode.get() is None


def test_whatever_a_kernel_is_made_of_is_among_the_sources() -> None:
    """A change in any of these files must be seen, or a start would skip what it has to compile."""
    package = Path(chorale.__path__[0])
    rooms = {root.relative_to(package).as_posix() for root in SOURCES}
    assert rooms == {"config", "engine", "kernels", "model", "parallel", "runtime", "serve"}
    kernels = [path for path in package.rglob("*.py") if "import triton" in path.read_text("utf-8")]
    assert len(kernels) > 20
    assert [path for path in kernels if not any(path.is_relative_to(root) for root in SOURCES)] == []
