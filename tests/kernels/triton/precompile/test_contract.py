"""What precompilation relies on in Triton, for the installed version: names, and what a compilation shows.

A failure names what has changed. ``docs/explanation/kernels.md`` lists the versions that this was run with.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import triton
from triton.runtime import _async_compile
from triton.runtime.jit import JITFunction

from chorale.config.engine import EngineConfig
from chorale.kernels.reference.ops import REFERENCE_OPS
from chorale.kernels.triton.precompile import contract, make_precompiler
from chorale.kernels.triton.precompile.contract import ContractError, check
from chorale.serve.engine import compile_phase, process
from tests.support import ROOT


def test_the_installed_version_has_every_name() -> None:
    check()


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a process that compiles kernels for sm_90 has seen: see ``tests/support/kernels``."""
    folder = tmp_path_factory.mktemp("cache")
    path = os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", "")))  # another Triton may be on it
    settings = os.environ | {"PYTHONPATH": path, "TRITON_INTERPRET": "0"}
    settings |= {"TRITON_CACHE_DIR": str(folder), "TRITON_DEFAULT_FP_FUSION": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.kernels.contract_compiles"],
        env=settings, cwd=folder, capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_kernels_are_compiled_by_processes(compiled: dict[str, Any]) -> None:
    """A kernel and one of Gluon's, with what they call, found on disk afterwards by this process's key."""
    assert compiled["pooled"] == [2, 0, 0, 2]


def test_keys_do_not_depend_on_which_kernel_was_asked_for_first(compiled: dict[str, Any]) -> None:
    """Another process, which has settled them, finds the same ones, whatever it asks for afterwards."""
    assert len(compiled["keys"]) == 2
    assert all("_NUM_SHORT" in names for names in compiled["keys"])


CHANGES: dict[str, tuple[Any, str, Any, str]] = {
    "run": (JITFunction, "run", lambda self, *args, grid, **more: None, "no parameter warmup"),
    "compile": (triton, "compile", lambda src, target: None, "no parameter options"),
    "mode": (_async_compile, "active_mode", None, "active_mode is not a context variable"),
    "submit": (_async_compile.AsyncCompileMode, "submit", lambda self, job: None, "no parameter key"),
    "closure": (JITFunction, "_do_compile", lambda self: None, "does not close over src, target"),
    "key": (JITFunction, "cache_key", "", "cache_key is not a property"),
}


@pytest.mark.parametrize(("owner", "name", "value", "words"), CHANGES.values(), ids=CHANGES)
def test_a_change_is_named(
    owner: Any, name: str, value: Any, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, name, value)
    with pytest.raises(ContractError, match=words) as raised:
        check()
    assert triton.__version__ in str(raised.value)


def test_a_missing_module_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton.runtime._async_compile", None)
    with pytest.raises(ContractError, match=r"triton\.runtime\._async_compile cannot be imported"):
        check()


def test_a_server_on_another_triton_warns_and_goes_without(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(contract._NAMES, "triton.runtime.jit", ("JITFunction", "of_the_future"))
    ops = SimpleNamespace(precompiler=make_precompiler)
    before = JITFunction.run, _async_compile.active_mode.get()
    with caplog.at_level(logging.WARNING):
        assert compile_phase.make_precompiler(EngineConfig(), ops) is None  # type: ignore[arg-type]
    assert "kernels compile at their first launch" in caplog.text
    assert "triton.runtime.jit.of_the_future is missing" in caplog.text
    assert (JITFunction.run, _async_compile.active_mode.get()) == before


def test_what_fails_later_is_taken_back(caplog: pytest.LogCaptureFixture) -> None:
    """A dry run that fails: the hook goes, and launches compile as without it."""
    precompiler = make_precompiler(lambda: None)
    token = _async_compile.active_mode.set(None)
    model: Any = SimpleNamespace()
    try:
        with precompiler.recording():
            assert _async_compile.active_mode.get() is precompiler
        with caplog.at_level(logging.WARNING):
            compile_phase.DryModel(model, model, model, model).precompile(precompiler, lambda *_: None)
        assert _async_compile.active_mode.get() is None
    finally:
        _async_compile.active_mode.reset(token)
    assert "kernels compile at their first launch" in caplog.text


def test_the_operator_can_switch_it_off() -> None:
    def never(start_pool: object) -> Any:
        raise AssertionError("the precompiler was made")

    ops: Any = SimpleNamespace(precompiler=never)
    before = JITFunction.run, _async_compile.active_mode.get()
    assert compile_phase.make_precompiler(EngineConfig(precompile_kernels=False), ops) is None
    assert (JITFunction.run, _async_compile.active_mode.get()) == before
    assert compile_phase.make_precompiler(EngineConfig(), REFERENCE_OPS) is None


@pytest.mark.parametrize("is_on", [True, False])
def test_no_process_is_started_early_if_it_is_off(is_on: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    monkeypatch.setattr(process, "_NVIDIA", os.devnull)  # as on a machine with a driver
    monkeypatch.setattr(process.pool, "cache_exists", lambda: False)
    monkeypatch.setattr(process.pool, "start", sizes.append)
    process.early_pool(EngineConfig(precompile_kernels=is_on))
    assert len(sizes) == is_on
