"""An engine with adapters: each request gets its own weights, whatever else runs."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path

import msgspec
import pytest

from chorale.engine.commands import Command
from chorale.engine.core import EngineCore
from chorale.engine.drafts.lookup import NgramDrafter
from chorale.engine.types import AdapterRef, GenerateRequest
from chorale.errors import AdapterError, ConfigError
from tests.support.device.lora import write_adapter
from tests.support.runtime import (
    Answer,
    each_alone,
    make_engine,
    random_prompt,
    request,
    run,
    small_config,
    tokens_of,
    write_checkpoint,
)

FORMS = ("attention", "tinker", "head", "parameters")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint in ``model`` and an adapter of each form."""
    root = tmp_path_factory.mktemp("lora")
    write_checkpoint(root / "model")
    for seed, form in enumerate(FORMS):
        write_adapter(root / form, small_config(), form, seed)
    return root


@pytest.fixture(scope="module")
def core(folder: Path) -> EngineCore:
    return make_engine(folder / "model", enable_lora=True, max_loras=2, max_cpu_loras=3)


def adapter_request(
    name: str, folder: Path, form: str, length: int = 40, prompt: int = 5, **sampling: object
) -> GenerateRequest:
    given = {"temperature": 0.0, "max_tokens": 8, **sampling}
    plain = request(name, random_prompt(length, seed=prompt), **given)
    if not form:
        return plain
    ref = AdapterRef(1 + FORMS.index(form), form, str(folder / form))
    return msgspec.structs.replace(plain, adapter=ref)


def only(answers: dict[str, list[Answer]]) -> Answer:
    ((answer,),) = answers.values()
    return answer


def test_mixed_requests_equal_running_alone(core: EngineCore, folder: Path) -> None:
    """More adapters than slots, the same prompt: cached blocks are not shared between them."""
    work = [
        adapter_request(f"{form}-{turn}", folder, form, temperature=temperature, seed=7, n=2)
        for turn, temperature in enumerate((0.0, 1.0))
        for form in ("", *FORMS)
    ]
    found = tokens_of(run(core, work))
    assert found == each_alone(core, work)
    greedy = {tuple(map(tuple, found[f"{form}-0"])) for form in ("", *FORMS)}
    assert len(greedy) == len(FORMS) + 1, "every adapter changes the answer"


def test_the_prefix_cache_is_keyed_by_the_adapter(core: EngineCore, folder: Path) -> None:
    prompts = {"length": 64, "prompt": 6}
    first = only(run(core, [adapter_request("a", folder, "attention", **prompts)]))
    again = only(run(core, [adapter_request("b", folder, "attention", **prompts)]))
    other = only(run(core, [adapter_request("c", folder, "tinker", **prompts)]))
    assert (first.num_cached_tokens, other.num_cached_tokens) == (0, 0)
    assert again.num_cached_tokens == 48
    assert again.token_ids == first.token_ids


def test_drafts_change_no_token(core: EngineCore, folder: Path) -> None:
    options = {"enable_lora": True, "max_loras": 3}
    guessing = make_engine(folder / "model", NgramDrafter(3, 1, 3), **options)
    work = [
        adapter_request(form or "base", folder, form, max_tokens=40, temperature=0.0)
        for form in ("", "attention", "parameters")
    ]
    assert tokens_of(run(guessing, work)) == tokens_of(run(core, work))
    assert guessing.stats().num_draft_tokens > 0


def test_prompt_logprobs_come_from_the_adapter(core: EngineCore, folder: Path) -> None:
    base = only(run(core, [adapter_request("p", folder, "", prompt_logprobs=0)]))
    for form in ("attention", "head"):
        own = only(run(core, [adapter_request("p", folder, form, prompt_logprobs=0)]))
        assert own.prompt_logprobs is not None
        assert base.prompt_logprobs is not None
        assert own.prompt_logprobs[5] != base.prompt_logprobs[5]


def test_an_adapter_that_disappears_ends_its_requests_only(core: EngineCore, folder: Path) -> None:
    copy = folder / "copy"
    shutil.copytree(folder / "attention", copy)
    loaded = core.control(Command(action="load_adapter", adapter=AdapterRef(50, "copy", str(copy))))
    loaded.result(30)
    (copy / "adapter_config.json").unlink()
    gone = AdapterRef(51, "gone", str(copy))
    with pytest.raises(AdapterError):
        core.control(Command(action="load_adapter", adapter=gone)).result(30)
    bad = msgspec.structs.replace(adapter_request("bad", folder, "attention"), adapter=gone)
    found = run(core, [bad, adapter_request("good", folder, "attention")])
    assert found["bad"][0].finish_reason == "error"
    assert "adapter_config.json" in (found["bad"][0].error or "")
    assert found["good"][0].finish_reason == "length"
    assert core.stats().running_adapters == ()


def test_a_slow_load_delays_no_step(core: EngineCore, folder: Path) -> None:
    """Another row gets a token in every step while the reading thread is busy."""
    busy = threading.Event()
    core._adapters._service._thread.submit(busy.wait)  # type: ignore[union-attr]
    own = adapter_request("slow", folder, "attention")
    slow = AdapterRef(52, "slow", str(folder / "attention"))
    loading = core.control(Command(action="load_adapter", adapter=slow))
    core.add_request(msgspec.structs.replace(own, adapter=slow))
    core.add_request(adapter_request("base", folder, "", length=3, max_tokens=50))
    tokens = [[len(chunk.token_ids) for chunk in core.step()] for _ in range(50)]
    assert tokens == [[1]] * 50
    assert not loading.done()
    busy.set()
    loading.result(60)
    ended = []
    while core.has_work:
        ended += [chunk.request_id for chunk in core.step() if chunk.finish_reason == "length"]
    assert ended == ["slow"]


def test_engines_without_adapters_refuse_them(folder: Path) -> None:
    plain = make_engine(folder / "model")
    found = only(run(plain, [adapter_request("x", folder, "attention")]))
    assert found.finish_reason == "error"
    assert "--enable-lora" in (found.error or "")


def test_an_adapter_over_the_rank_limit_ends_the_start(folder: Path) -> None:
    from chorale.config.adapters import LoraModule

    modules = (LoraModule("x", str(folder / "attention")),)
    with pytest.raises(ConfigError, match="--max-lora-rank"):
        make_engine(folder / "model", enable_lora=True, max_lora_rank=2, lora_modules=modules)
