"""Engines of two rank processes with adapters, each rank with its part of them."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from chorale.engine.commands import Command
from chorale.engine.core import EngineCore
from chorale.engine.types import AdapterRef
from chorale.errors import AdapterError
from chorale.kernels.adapters import tensors_of
from tests.runtime.test_adapters import FORMS, adapter_request, only
from tests.runtime.test_adapters import folder as folder
from tests.support.runtime import make_engine, run, tokens_of

OPTIONS = {"enable_lora": True, "max_loras": 2, "max_cpu_loras": 3, "prompt_delay": 0.0}


@pytest.fixture(scope="module")
def ranks(folder: Path) -> Iterator[EngineCore]:
    core = make_engine(folder / "model", tensor_parallel_size=2, enable_sleep_mode=True, **OPTIONS)
    yield core
    core.shutdown()


def test_two_ranks_give_the_tokens_of_one(ranks: EngineCore, folder: Path) -> None:
    """More adapters than slots, and the base model."""
    alone = make_engine(folder / "model", ops="reference", **OPTIONS)
    work = [
        adapter_request(f"{form}-{n}", folder, form, prompt=n, temperature=float(n), seed=7)
        for n in range(2)
        for form in ("", *FORMS)
    ]
    expected = tokens_of(run(alone, work))
    assert len({str(expected[f"{form}-0"]) for form in ("", *FORMS)}) == 5
    assert tokens_of(run(ranks, work)) == expected


def test_a_fault_of_an_adapter_reaches_its_request_alone(ranks: EngineCore, folder: Path) -> None:
    gone = AdapterRef(60, "gone", str(folder / "gone"))
    with pytest.raises(AdapterError, match="no such folder"):
        ranks.control(Command(action="load_adapter", adapter=gone)).result(60)
    shutil.copytree(folder / "attention", folder / "gone")
    ranks.control(Command(action="load_adapter", adapter=gone)).result(60)
    ranks.control(Command(action="unload_adapter", adapter=gone)).result(60)
    shutil.rmtree(folder / "gone")
    good = adapter_request("good", folder, "tinker")
    found = run(ranks, [msgspec.structs.replace(good, request_id="bad", adapter=gone), good])
    assert (found["bad"][0].finish_reason, found["good"][0].finish_reason) == ("error", "length")


@pytest.mark.parametrize("size", [1, 2])
def test_adapters_come_back_after_a_sleep(size: int, ranks: EngineCore, folder: Path, tmp_path: Path) -> None:
    """Of a request in the middle, too, and if their files are gone."""
    core = ranks if size == 2 else make_engine(folder / "model", enable_sleep_mode=True, **OPTIONS)
    shutil.copytree(folder / "tinker", tmp_path / "own")
    own = AdapterRef(70 + size, "own", str(tmp_path / "own"))
    asked = msgspec.structs.replace(adapter_request("a", folder, "tinker", max_tokens=12), adapter=own)
    expected = only(run(core, [asked])).token_ids
    shutil.rmtree(tmp_path / "own")
    for level in (1, 2):
        tokens: list[int] = []

        def step_until(is_done: Callable[[], bool], tokens: list[int] = tokens) -> None:
            while not is_done():
                tokens.extend(token for chunk in core.step() for token in chunk.token_ids)

        core.add_request(asked)
        step_until(lambda tokens=tokens: len(tokens) > 4)  # type: ignore[misc]
        step_until(core.control(Command(action="sleep", level=level, mode="keep")).done)
        if size == 1:
            found = tensors_of(tuple(core._adapters._service.on_device()))  # type: ignore[union-attr]
            assert sum(tensor.untyped_storage().nbytes() for tensor in found) == 0
        core.control(Command(action="wake_up")).result(0)
        step_until(lambda: not core.has_work)
        assert tokens == expected
