"""Every sampling field arrives from HTTP, ``LLM`` and summaries in the engine, and acts there."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from chorale import LLM, SamplingParams
from chorale.client.base import EngineInfo
from chorale.config.sampling_fields import GENERATION, SAMPLING_FIELDS, Range
from chorale.engine.admission import Admission
from chorale.engine.core import EngineCore
from chorale.engine.types import EngineLimits, GenerateRequest, RowStart, SamplingSpec
from chorale.errors import ModelConfigError
from chorale.model.config import _read_sampling
from chorale.runtime.sampling.row_state import RowSamplingState
from chorale.runtime.sampling.sampler import Sampler
from chorale.serve.engine import build
from chorale.turns.compaction import sampling_of_pass
from tests.support.engine.fake_executor import FakeExecutor
from tests.support.runtime import CPU, row_start, sampling_batch
from tests.support.scripted import FINAL, playing
from tests.support.server import served

LIMITS = EngineLimits(
    num_blocks=4000, block_size=16, max_num_seqs=4, max_num_batched_tokens=512, max_model_len=8192
)
INFO = EngineInfo(model="fake", max_model_len=8192, max_num_seqs=4)
# Fields that are not numbers: (value in a request, value in the engine). None: any but the default.
OTHERS: dict[str, tuple[Any, Any]] = {
    "logit_bias": ({"5": 2.0}, {5: 2.0}),
    "allowed_token_ids": ([5, 6], (5, 6)),
    "bad_words": (["dog"], None),
    "ignore_eos": (True, True),
    "stop_token_ids": ([77], (77,)),
}
# Structured outputs, rounds after a tool, routed experts, and fields that only ``LLM`` has: tested elsewhere.
ELSEWHERE = {
    "grammar", "grammar_context", "routed_experts_start", "logprob_token_ids", "skip_reading_prefix_cache",
}  # fmt: skip
MESSAGES = [{"role": "user", "content": "a"}]
ENDPOINTS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {"messages": MESSAGES}),
    "completions": ("/v1/completions", {"prompt": "a"}),
    "responses": ("/v1/responses", {"input": "a"}),
    "messages": ("/v1/messages", {"messages": MESSAGES, "max_tokens": 50}),
}
# Fields for which an endpoint has another name. None: the endpoint refuses the field.
SAID: dict[tuple[str, str], dict[str, Any] | None] = {
    ("chat", "logprobs"): {"logprobs": True, "top_logprobs": 13},
    ("responses", "logprobs"): {"top_logprobs": 13, "include": ["message.output_text.logprobs"]},
    ("responses", "max_tokens"): {"max_output_tokens": 14},
    ("responses", "n"): None,
    ("responses", "prompt_logprobs"): None,
    ("messages", "logprobs"): None,
    ("messages", "n"): None,
    ("messages", "prompt_logprobs"): None,
}


def example(name: str) -> Any:
    """Returns a value other than the default that HTTP, ``LLM`` and the engine allow."""
    if name in OTHERS:
        return OTHERS[name][0]
    field = SAMPLING_FIELDS[name]
    ranges = (field.engine, field.http_range, field.llm_range)
    low, high = max(r.low for r in ranges), min(r.high for r in ranges)
    if field.type == "integer":
        return int(max(low, 0)) + 13
    return low + (min(high, low + 4) - low) * 0.4


def arrives(name: str, spec: SamplingSpec) -> bool:
    got, wanted = getattr(spec, name), OTHERS.get(name, (None, example(name)))[1]
    return bool(got != getattr(SamplingSpec(), name) if wanted is None else got == wanted)


NAMES = [*(name for name in SAMPLING_FIELDS if name not in OTHERS), *OTHERS]


def test_every_field_of_the_engine_is_tried_here() -> None:
    fields = {field.name: field for field in msgspec.structs.fields(SamplingSpec)}
    assert fields.keys() - ELSEWHERE == set(NAMES)
    for name, field in SAMPLING_FIELDS.items():
        if not field.each:
            assert fields[name].default == field.default, name
            assert SamplingParams().__dict__[name] == (field.llm_default or field.default), name
        if name not in OTHERS:
            assert example(name) != field.default, name


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_a_field_arrives_over_http(endpoint: str, name: str) -> None:
    path, body = ENDPOINTS[endpoint]
    said = SAID.get((endpoint, name), {name: example(name)})
    client = playing(f"{FINAL}Yes.<|return|>")

    async def status(fields: dict[str, Any]) -> int:
        async with served(client, unknown_fields="refuse") as server:
            return (await server.http.post(path, json={**body, **fields})).status_code

    if said is None:  # refused, not ignored
        assert asyncio.run(status({name: example(name)})) == 400
    else:
        assert asyncio.run(status(said)) == 200
        assert arrives(name, client.requests[0].sampling)


class RecordingCore(EngineCore):
    def __init__(self) -> None:
        super().__init__(LIMITS, FakeExecutor(LIMITS))
        self.seen: list[GenerateRequest] = []

    def add_request(self, request: GenerateRequest) -> None:
        self.seen.append(request)
        super().add_request(request)


@pytest.fixture
def core(monkeypatch: pytest.MonkeyPatch) -> Iterator[RecordingCore]:
    made = RecordingCore()
    monkeypatch.setattr(build, "build_engine", lambda *_, **__: (made, INFO))
    return made


@pytest.mark.parametrize("face", ["generate", "chat"])
@pytest.mark.parametrize("name", NAMES)
def test_a_field_arrives_through_llm(core: RecordingCore, name: str, face: str) -> None:
    value = {5: 2.0} if name == "logit_bias" else example(name)
    params = SamplingParams(**{"max_tokens": 20, name: value})
    with LLM() as llm:
        if face == "generate":
            llm.generate("a", params)
        else:
            llm.chat(MESSAGES, params)
    assert arrives(name, core.seen[0].sampling)


@pytest.mark.parametrize("name", NAMES)
def test_a_summary_uses_a_field_only_if_in_summary_is_set(name: str) -> None:
    wanted = OTHERS.get(name, (None, example(name)))[1]
    given = SamplingSpec(**{name: ((1, 2),) if name == "bad_words" else wanted})
    spec = sampling_of_pass(given, INFO, 100)
    assert spec is not None
    in_summary = name in SAMPLING_FIELDS and SAMPLING_FIELDS[name].in_summary
    assert arrives(name, spec) == in_summary
    if not in_summary and name != "max_tokens":  # a summary has its own length
        assert getattr(spec, name) == getattr(SamplingSpec(), name)


def state(sampling: SamplingSpec) -> list[Any]:
    """Returns the state of a request in the engine's sequences and in the device's row."""
    request = GenerateRequest(request_id="r", prompt_token_ids=[1, 2, 3], sampling=sampling)
    sequences = Admission(LIMITS, 10**6).accept(request, 0.0).sequences
    rows = RowSamplingState(1, 512, 64, torch.device("cpu"))
    first = sequences[0]
    seed = 0 if sampling.seed is None else first.seed
    start = RowStart(0, first.all_tokens(), 3, sampling, seed, tuple(sorted(first.stop_ids)))
    rows.start(start)
    return [len(sequences), first.max_len, sorted(first.stop_ids), vars(rows)]


def numbers(value: Any) -> Iterator[float]:
    """Yields every number within arrays, containers and objects."""
    if isinstance(value, bool | int | float):
        yield float(value)
    elif hasattr(value, "tolist"):
        yield from numbers(value.tolist())
    elif isinstance(value, dict | tuple | list):
        for item in value.items() if isinstance(value, dict) else value:
            yield from numbers(item)
    else:
        for name in getattr(type(value), "__slots__", ()):
            yield from numbers(getattr(value, name))


@pytest.mark.parametrize("name", NAMES)
def test_a_field_reaches_the_sequence_or_the_row(name: str) -> None:
    wanted = OTHERS.get(name, (None, example(name)))[1]
    value = ((1, 2),) if name == "bad_words" else wanted
    found, usual = list(numbers(state(SamplingSpec(**{name: value})))), list(numbers(state(SamplingSpec())))
    assert found != usual
    if name not in OTHERS:
        number = value + 3 if name in ("max_tokens", "min_tokens") else value  # with the prompt's tokens
        assert any(math.isclose(each, number, rel_tol=1e-6) for each in found)
        assert not any(math.isclose(each, number, rel_tol=1e-6) for each in usual)


# Fields that act in the engine, not in the sampler: tested elsewhere.
NOT_SAMPLED_BY = {"seed", "max_tokens", "n", "logprobs", "prompt_logprobs", "ignore_eos", "stop_token_ids"}


def sampled(sampling: SamplingSpec) -> list[int]:
    """Returns the tokens of 200 rows that differ only by seed. The ids that the examples name are likely."""
    count, vocab = 200, 97
    rows = RowSamplingState(count, vocab, 64, CPU.torch_device)
    for row in range(count):
        rows.start(row_start(row, sampling, [7, 8], [1], row, (3,)))
    logits = torch.from_numpy(np.random.default_rng(0).normal(0, 1.5, (1, vocab)).astype(np.float32))
    logits[0, [1, 2, 3, 7]] = 3.0
    batch = sampling_batch(rows, list(range(count)), [3] * count)
    tokens: list[int] = Sampler(CPU, vocab, forbidden=()).sample(logits.expand(count, -1), batch).tolist()
    return tokens


@pytest.mark.parametrize("name", [name for name in NAMES if name not in NOT_SAMPLED_BY])
def test_a_field_changes_the_sampled_tokens(name: str) -> None:
    wanted = OTHERS.get(name, (None, example(name)))[1]
    value = ((1, 2),) if name == "bad_words" else wanted
    assert sampled(SamplingSpec(**{name: value})) != sampled(SamplingSpec())


# --------------------------------------------------------------------------- ranges


def inside(inner: Range, outer: Range) -> bool:
    low = inner.low > outer.low or (inner.low == outer.low and inner.above >= outer.above)
    return low and inner.high <= outer.high


def test_llm_allows_the_http_ranges_and_the_engine_the_llm_ranges() -> None:
    for name, field in SAMPLING_FIELDS.items():
        assert inside(field.http_range, field.llm_range), name
        if name != "top_k":  # -1 means 0 in requests
            assert inside(field.llm_range, field.engine), name


@pytest.mark.parametrize("name", GENERATION)
def test_a_checkpoint_sets_a_field(core: RecordingCore, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    field, value = GENERATION[name], float(example(GENERATION[name]))
    assert _read_sampling({name: value}) == {name: value}
    for wrong in (SAMPLING_FIELDS[field].llm_range.low - 1, SAMPLING_FIELDS[field].llm_range.high * 2 + 1):
        with pytest.raises(ModelConfigError, match=name):
            _read_sampling({name: wrong})
    info = msgspec.structs.replace(INFO, default_sampling={name: value})
    monkeypatch.setattr(build, "build_engine", lambda *_, **__: (core, info))
    with LLM() as llm:
        assert llm.get_default_sampling_params() == SamplingParams(**{field: example(field)})
        llm.generate("a")
    assert arrives(field, core.seen[0].sampling)

    async def main() -> SamplingSpec:
        client = playing(f"{FINAL}Yes.<|return|>")
        client.info_value = msgspec.structs.replace(client.info_value, default_sampling={name: value})
        async with served(client) as server:
            assert (await server.chat()).status_code == 200
        return client.requests[0].sampling

    assert arrives(field, asyncio.run(main()))


def test_ranges_are_printed_with_plain_numbers() -> None:
    assert str(Range(-1048576, 2097152.0)) == "from -1048576 to 2097152"
