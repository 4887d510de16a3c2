"""``SamplingParams(structured_outputs=...)``: raw text from its first token, and the answer of a chat."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from chorale import LLM, SamplingParams
from chorale.harmony.vocab import CALL, load_vocabulary
from chorale.llm import StructuredOutputsParams
from tests.support.grammar.schema_cases import BIAS, SCHEMAS, valid

LOGIT_BIAS = {int(token): bias for token, bias in BIAS.items()}


@pytest.fixture(scope="module")
def llm(checkpoint: Path) -> Iterator[LLM]:
    with LLM(str(checkpoint), device="cpu", max_model_len=2048, max_num_seqs=8, num_threads=1) as made:
        yield made


def params(seed: int = 1, **wanted: object) -> SamplingParams:
    return SamplingParams(structured_outputs=wanted, seed=seed, logit_bias=LOGIT_BIAS, max_tokens=900)


def test_generate(llm: LLM) -> None:
    constraint = StructuredOutputsParams(choice=["yes", "no"])
    wanted = [
        SamplingParams(structured_outputs=constraint, seed=1, logit_bias=LOGIT_BIAS, max_tokens=900),
        params(regex="[ab]{3}"),
        params(json=SCHEMAS["any_of"]),
        params(json=json.dumps(SCHEMAS["enum"])),
        params(json_object=True),
    ]
    texts = [output.outputs[0].text for output in llm.generate(["x"] * 5, wanted)]
    assert texts[0] in ("yes", "no")
    assert set(texts[1]) <= {"a", "b"}
    assert len(texts[1]) == 3
    assert valid(json.loads(texts[2]), SCHEMAS["any_of"])
    assert valid(json.loads(texts[3]), SCHEMAS["enum"])
    assert isinstance(json.loads(texts[4]), dict)


def tool(**schema: object) -> dict[str, object]:
    return {"type": "function", "function": {"name": "get", "parameters": schema, "strict": True}}


def test_strict_tools_bind_when_they_are_called(llm: LLM) -> None:
    lures = load_vocabulary().encode_with_special("<|call|><|end|> to=functions.get<|channel|>commentary")
    bias = dict.fromkeys(lures, 12.0) | LOGIT_BIAS
    own = SamplingParams(n=16, seed=1, logit_bias=bias, max_tokens=300)
    schema = {"type": "object", "properties": {"unit": {"enum": ["c", "f"]}}, "required": ["unit"]}
    (output,) = llm.chat([{"role": "user", "content": "hi"}], own, tools=[tool(**schema)])
    called = [choice for choice in output.outputs if choice.stop_reason == CALL]
    assert len(called) >= 2
    for choice in called:
        (made,) = choice.tool_calls
        assert made.name == "get"
        assert valid(json.loads(made.arguments), schema)


def test_an_unenforceable_constraint_fails_before_anything_runs(llm: LLM) -> None:
    with pytest.raises(ValueError, match="not"):
        llm.generate("x", params(json={"not": {}}))
    with pytest.raises(ValueError, match=r"structured_outputs\.regex"):
        llm.generate("x", params(regex="("))
    with pytest.raises(ValueError, match=r"structured_outputs\.choice"):
        llm.generate("x", params(choice="word"))  # a string is not a list of choices
    messages = [{"role": "user", "content": "hi"}]
    with pytest.raises(ValueError, match=r"tools\[0\]\.function\.parameters"):
        llm.chat(messages, tools=[tool(type="object", properties={"a": {"not": {}}}, required=["a"])])
    with pytest.raises(ValueError, match="ignore_eos"):
        llm.chat(messages, SamplingParams(ignore_eos=True), tools=[tool(type="object")])
