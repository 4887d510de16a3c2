"""Engines of two rank processes with adapters, each rank with its part of them."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from chorale.engine.commands import Command
from chorale.engine.core import EngineCore
from chorale.engine.types import AdapterRef, GenerateRequest
from chorale.errors import AdapterError
from chorale.kernels.cpu.library import library
from tests.runtime.test_adapters import FORMS, adapter_request, only
from tests.runtime.test_adapters import folder as folder
from tests.support.runtime import make_engine, run, tokens_of

OPTIONS = {"enable_lora": True, "max_loras": 2, "max_cpu_loras": 3, "prompt_delay": 0.0}


@pytest.fixture(scope="module")
def ranks(folder: Path) -> Iterator[EngineCore]:
    core = make_engine(folder / "model", tensor_parallel_size=2, enable_sleep_mode=True, **OPTIONS)
    yield core
    core.shutdown()


def work_of(folder: Path, length: int = 40) -> list[GenerateRequest]:
    """More adapters than slots, and the base model."""
    return [
        adapter_request(f"{form}-{n}", folder, form, length, n, temperature=float(n), seed=7, logprobs=2)
        for n in range(2)
        for form in ("", *FORMS)
    ]


def test_two_ranks_give_the_tokens_of_one(ranks: EngineCore, folder: Path) -> None:
    alone = make_engine(folder / "model", ops="reference", **OPTIONS)
    expected = tokens_of(run(alone, work_of(folder)))
    assert len({str(expected[f"{form}-0"]) for form in ("", *FORMS)}) == 5
    assert tokens_of(run(ranks, work_of(folder))) == expected


@pytest.mark.skipif(library().functions is None, reason="the CPU library was not built")
def test_batch_invariant_ranks_give_the_bits_of_one(folder: Path) -> None:
    found = []
    for size in (1, 2):
        core = make_engine(folder / "model", tensor_parallel_size=size, batch_invariant=True, **OPTIONS)
        found.append(run(core, work_of(folder, length=9)))
        core.shutdown()
    assert found[0] == found[1]


def test_a_fault_of_an_adapter_reaches_its_request_alone(ranks: EngineCore, folder: Path) -> None:
    gone = AdapterRef(60, "gone", str(folder / "gone"))
    with pytest.raises(AdapterError, match="no such folder"):
        ranks.control(Command(action="load_adapter", adapter=gone)).result(60)
    shutil.copytree(folder / "attention", folder / "gone")
    ranks.control(Command(action="load_adapter", adapter=gone)).result(60)
    ranks.control(Command(action="unload_adapter", adapter=gone)).result(60)
    shutil.rmtree(folder / "gone")
    base, good, bad = (adapter_request(form or "base", folder, form) for form in ("", "tinker", "attention"))
    bad = msgspec.structs.replace(bad, request_id="bad", adapter=gone)
    found = run(ranks, [bad, good, base])
    assert {name: answers[0].finish_reason for name, answers in found.items()} == {
        "bad": "error", "tinker": "length", "base": "length",
    }  # fmt: skip


@pytest.mark.parametrize("size", [1, 2])
def test_adapters_come_back_after_a_sleep(size: int, ranks: EngineCore, folder: Path, tmp_path: Path) -> None:
    """Of a request in the middle, too, and if their files are gone."""
    core = ranks if size == 2 else make_engine(folder / "model", enable_sleep_mode=True, **OPTIONS)
    shutil.copytree(folder / "tinker", tmp_path / "own")
    asked = adapter_request("a", folder, "tinker", max_tokens=12)
    ref = AdapterRef(70 + size, "own", str(tmp_path / "own"))
    asked = msgspec.structs.replace(asked, adapter=ref)
    expected = only(run(core, [asked])).token_ids
    shutil.rmtree(tmp_path / "own")
    for level in (1, 2):
        core.add_request(asked)
        tokens: list[int] = []
        while len(tokens) < 5:
            tokens += [token for chunk in core.step() for token in chunk.token_ids]
        slept = core.control(Command(action="sleep", level=level, mode="keep"))
        while not slept.done():
            tokens += [token for chunk in core.step() for token in chunk.token_ids]
        if size == 1:
            assert all(tensor.untyped_storage().nbytes() == 0 for tensor in _tensors(core))
        core.control(Command(action="wake_up")).result(0)
        while core.has_work:
            tokens += [token for chunk in core.step() for token in chunk.token_ids]
        assert tokens == expected


def _tensors(core: EngineCore) -> list[object]:
    from chorale.kernels.adapters import tensors_of

    return list(tensors_of(tuple(core._adapters._service.on_device())))  # type: ignore[union-attr]
