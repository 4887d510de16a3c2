"""LLM and SamplingParams (vLLM's API) on a tiny random checkpoint with the full vocabulary."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from chorale import LLM, SamplingParams
from chorale.config.engine import EngineConfig
from chorale.config.seeds import choice_seed
from chorale.engine.types import TokenChunk
from chorale.errors import ConfigError, ContextLengthError, EngineDeadError, EngineError
from chorale.harmony.vocab import (
    CALL,
    CHANNEL,
    CONSTRAIN,
    END,
    ENDOFTEXT,
    MESSAGE,
    RETURN,
    START,
    export_vocabulary,
    load_vocabulary,
)
from chorale.serve.engine import build
from tests.llm.scripted_core import scripted_llm

torch.set_num_threads(1)
SIZES: dict[str, Any] = {
    "layers": 2, "experts": 4, "hidden": 32, "inter": 32, "heads": 4, "kv_heads": 2, "head_dim": 8,
    "sliding_window": 16,
}  # fmt: skip
OPTIONS: dict[str, Any] = {"max_model_len": 512, "max_num_seqs": 8}


# --------------------------------------------------------------------------- generate


def test_every_form_of_a_prompt_gives_the_same_tokens(llm: LLM) -> None:
    params = SamplingParams(max_tokens=5, seed=1)
    ids = load_vocabulary().encode("Hello there")
    outputs = llm.generate(
        ["Hello there", {"prompt": "Hello there"}, {"prompt_token_ids": ids}, ids], params, use_tqdm=False
    )
    outputs += llm.generate("Hello there", params) + llm.generate(ids, params)
    outputs += llm.generate({"prompt_token_ids": ids}, params)
    outputs += llm.generate(prompt_token_ids=[ids], sampling_params=params) + llm.generate(
        prompt_token_ids=ids, sampling_params=params
    )
    assert {tuple(output.prompt_token_ids) for output in outputs} == {tuple(ids)}
    assert [output.prompt for output in outputs[:4]] == ["Hello there", "Hello there", None, None]
    assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == 1
    first = outputs[0].outputs[0]
    assert first.text == load_vocabulary().decode(first.token_ids)
    assert (first.index, first.finish_reason, first.stop_reason) == (0, "length", None)
    assert outputs[0].finished
    assert len({output.request_id for output in outputs}) == len(outputs)


def test_prompts_with_different_salts_share_no_pages(llm: LLM) -> None:
    ids, params = list(range(300, 400)), SamplingParams(max_tokens=1)
    cached = [
        llm.generate({"prompt_token_ids": ids, "cache_salt": salt, "multi_modal_data": None}, params)[0]
        for salt in ("one", "one", "two")
    ]
    assert [output.num_cached_tokens for output in cached] == [0, 96, 0]


def test_a_prompt_shared_by_choices_counts_as_computed_not_cached(llm: LLM) -> None:
    """As in the server's usage. Choices beyond the eight rows start later and reuse pages of the first."""
    ids, params = list(range(500, 600)), SamplingParams(max_tokens=1, n=12)
    cached = [llm.generate([ids], params)[0].num_cached_tokens for _ in range(2)]
    assert cached == [0, 96]


def test_raw_prompts_may_contain_special_tokens(llm: LLM) -> None:
    output = llm.generate("<|start|>user<|message|>x<|end|>", SamplingParams(max_tokens=1))[0]
    assert output.prompt_token_ids[0] == START
    assert output.prompt_token_ids[-1] == END


def test_a_list_has_one_sampling_params_for_each_prompt(llm: LLM) -> None:
    several = [SamplingParams(max_tokens=count) for count in (1, 4, 9)]
    outputs = llm.generate(["a", "b", "c"], several)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [1, 4, 9]
    for count in (2, 4):
        with pytest.raises(ValueError, match=f"{count} sampling_params for 3 prompts"):
            llm.generate(["a", "b", "c"], (several * 2)[:count])


def test_many_prompts_come_back_in_order(llm: LLM) -> None:
    """There are more prompts than the rows and the queue of a server can hold."""
    prompts = [[i + 1, 7] for i in range(60)]
    outputs = llm.generate(prompts, SamplingParams(max_tokens=2))
    assert [output.prompt_token_ids for output in outputs] == prompts


def test_each_choice_has_logprobs_of_its_tokens(llm: LLM) -> None:
    params = SamplingParams(n=3, max_tokens=4, seed=5, logprobs=2, prompt_logprobs=1)
    output = llm.generate([[1, 2, 3]], params)[0]
    assert [choice.index for choice in output.outputs] == [0, 1, 2]
    for choice in output.outputs:
        assert choice.logprobs is not None
        chosen = [at[token] for at, token in zip(choice.logprobs, choice.token_ids, strict=True)]
        assert choice.cumulative_logprob == pytest.approx(sum(entry.logprob for entry in chosen))
        assert all(2 <= len(at) <= 3 for at in choice.logprobs)
        assert chosen[0].decoded_token == load_vocabulary().decode(choice.token_ids[:1])
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    assert [3 in at for at in output.prompt_logprobs[2:] if at] == [True]


def test_stop_strings_end_the_text_and_the_token_ids_of_a_choice(llm: LLM) -> None:
    free = llm.generate([[9]], SamplingParams(max_tokens=30, seed=2))[0].outputs[0]
    stop = load_vocabulary().decode(free.token_ids[10:11])
    assert stop.strip("\ufffd")
    for include in (False, True):
        params = SamplingParams(max_tokens=30, seed=2, stop=[stop], include_stop_str_in_output=include)
        found = llm.generate([[9]], params)[0].outputs[0]
        assert (found.finish_reason, found.stop_reason) == ("stop", stop)
        assert found.token_ids == free.token_ids[: len(found.token_ids)]
        assert len(found.token_ids) <= 11
        assert found.text == free.text[: free.text.index(stop) + len(stop) * include]


def test_the_stop_reason_is_the_stop_token_except_for_return(llm: LLM) -> None:
    found = [
        llm.generate([[9]], SamplingParams(logit_bias={token: 100.0}, stop_token_ids=[100, CALL]))[0].outputs[
            0
        ]
        for token in (100, RETURN, CALL, ENDOFTEXT)
    ]
    assert [choice.finish_reason for choice in found] == ["stop"] * 4
    assert [choice.stop_reason for choice in found] == [100, None, CALL, ENDOFTEXT]
    assert [choice.text for choice in found] == [""] * 4
    assert found[1].token_ids == [RETURN]
    ignored = llm.generate([[9]], SamplingParams(logit_bias={RETURN: 100.0}, ignore_eos=True, max_tokens=3))
    assert ignored[0].outputs[0].token_ids == [RETURN] * 3


def test_the_text_includes_the_stop_token_on_request(llm: LLM) -> None:
    """The server does the same. A special token is included only if ``skip_special_tokens`` is false."""
    vocab, include = load_vocabulary(), {"include_stop_str_in_output": True}
    cases = [
        ({"stop_token_ids": [100]}, 100, ""),
        ({"stop_token_ids": [100], **include}, 100, vocab.decode([100])),
        (include, RETURN, ""),
        ({**include, "skip_special_tokens": False}, RETURN, "<|return|>"),
        ({"skip_special_tokens": False}, RETURN, ""),
    ]
    for given, token, text in cases:
        params = SamplingParams(logit_bias={token: 100.0}, **given)
        choice = llm.generate([[9]], params)[0].outputs[0]
        assert (choice.finish_reason, choice.token_ids, choice.text) == ("stop", [token], text)


def test_special_tokens_are_shown_only_on_request(llm: LLM) -> None:
    bias = {"logit_bias": {START: 100.0}, "max_tokens": 2}
    shown, hidden, none = (
        llm.generate([[9]], SamplingParams(**bias, **flags))[0].outputs[0].text
        for flags in ({"skip_special_tokens": False}, {}, {"detokenize": False})
    )
    assert (shown, hidden, none) == ("<|start|><|start|>", "", "")


def test_output_is_limited_by_the_context_length(llm: LLM) -> None:
    output = llm.generate([[1] * 500], SamplingParams(max_tokens=100, ignore_eos=True))[0].outputs[0]
    assert (len(output.token_ids), output.finish_reason) == (12, "length")


@pytest.mark.parametrize(
    ("prompts", "error"),
    [
        ([[]], ValueError),
        ([[1, -1]], ValueError),
        ([[201088]], ValueError),
        ([[1] * 512], ContextLengthError),
        ([1.5], TypeError),
        ([True, False], TypeError),
        ([[True, False]], TypeError),
        ({"multi_modal_data": 1}, ValueError),
        ({"prompt": "a", "multi_modal_data": {"image": 1}}, ValueError),
        ({"prompt": "a", "cache_salt": 1}, TypeError),
        ({"prompt": {"prompt": "a"}}, TypeError),
        (None, ValueError),
    ],
)
def test_a_bad_prompt_is_an_error(llm: LLM, prompts: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        llm.generate(prompts, SamplingParams(max_tokens=1))


def test_generate_works_inside_a_running_event_loop(llm: LLM) -> None:
    """Notebooks run cells in an event loop."""

    async def cell() -> int:
        return len(llm.generate([[1]], SamplingParams(max_tokens=2))[0].outputs[0].token_ids)

    assert asyncio.run(cell()) == 2


# --------------------------------------------------------------------------- harmony


def test_the_harmony_example_of_vllm_runs(llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The example renders a prompt with openai_harmony, generates token ids and parses them."""
    export_vocabulary(tmp_path)
    monkeypatch.setenv("TIKTOKEN_ENCODINGS_BASE", str(tmp_path))
    from openai_harmony import Conversation as TheirConversation
    from openai_harmony import HarmonyEncodingName, Role, load_harmony_encoding
    from openai_harmony import Message as TheirMessage
    from openai_harmony import SystemContent as TheirSystemContent

    encoding = load_harmony_encoding(HarmonyEncodingName.HARMONY_GPT_OSS)
    convo = TheirConversation.from_messages(
        [
            TheirMessage.from_role_and_content(Role.SYSTEM, TheirSystemContent.new()),
            TheirMessage.from_role_and_content(Role.USER, "What is the weather like in SF?"),
        ]
    )
    prefill_ids = encoding.render_conversation_for_completion(convo, Role.ASSISTANT)
    stop_token_ids = encoding.stop_tokens_for_assistant_actions()

    def generate(**more: Any) -> list[int]:
        sampling = SamplingParams(max_tokens=128, temperature=1, stop_token_ids=stop_token_ids, **more)
        outputs = llm.generate(prompt_token_ids=[prefill_ids], sampling_params=sampling)
        return outputs[0].outputs[0].token_ids

    # A random model does not generate harmony, so each token of a short answer is forced by its bias.
    answer = encoding.encode("<|channel|>final<|message|>Sunny.<|return|>", allowed_special="all")
    forced = [
        llm.generate(
            prompt_token_ids=[prefill_ids + answer[:i]],
            sampling_params=SamplingParams(max_tokens=1, logit_bias={token: 100.0}),
        )
        for i, token in enumerate(answer)
    ]  # fmt: skip
    output_ids = [token for outputs in forced for token in outputs[0].outputs[0].token_ids]
    assert output_ids == answer
    entries = encoding.parse_messages_from_completion_tokens(output_ids, Role.ASSISTANT)
    assert [(entry.channel, entry.content[0].text) for entry in entries] == [("final", "Sunny.")]
    assert 1 <= len(generate(seed=1)) <= 128
    assert generate(logit_bias={stop_token_ids[0]: 100.0}) == [stop_token_ids[0]]


HI = [{"role": "user", "content": "Hi"}]
SKY = [{"type": "function", "function": {"name": "sky", "parameters": {"type": "object"}}}]


@pytest.mark.parametrize("size", [1, 7, 1000])
@pytest.mark.parametrize(("stop", "text", "calls"), [(None, "Blue. STOP red", 1), ("STOP", "Blue. ", 0)])
def test_a_chat_turn_is_split_into_reasoning_answer_and_calls(
    monkeypatch: pytest.MonkeyPatch, size: int, stop: str | None, text: str, calls: int
) -> None:
    vocab = load_vocabulary()
    ids = [
        CHANNEL, *vocab.encode("analysis"), MESSAGE, *vocab.encode("Let me look."), END,
        START, *vocab.encode("assistant"), CHANNEL, *vocab.encode("final"), MESSAGE,
        *vocab.encode("Blue. STOP red"), END,
        START, *vocab.encode("assistant to=functions.sky"), CHANNEL, *vocab.encode("commentary "), CONSTRAIN,
        *vocab.encode("json"), MESSAGE, *vocab.encode('{"at": 1}'), CALL,
    ]  # fmt: skip
    with scripted_llm(monkeypatch, ids, size=size) as (llm, core):
        output = llm.chat(HI, SamplingParams(stop=stop, max_tokens=100), tools=SKY)[0].outputs[0]
    assert (output.reasoning, output.text) == ("Let me look.", text)
    assert [(call.name, call.arguments) for call in output.tool_calls] == [("sky", '{"at": 1}')][:calls]
    assert (output.finish_reason, output.stop_reason) == ("stop", stop or CALL)
    assert output.token_ids == ids[: len(output.token_ids)]
    assert len(core.aborted) == (stop is not None and size < len(ids))


def test_the_text_of_a_chat_turn_includes_the_stop_token_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    vocab = load_vocabulary()
    header = [CHANNEL, *vocab.encode("final"), MESSAGE]
    answer = vocab.encode("The sky is blue")
    with scripted_llm(monkeypatch, [*header, *answer]) as (llm, _):
        for include, text in ((False, "The sky is"), (True, "The sky is blue")):
            params = SamplingParams(stop_token_ids=[answer[-1]], include_stop_str_in_output=include)
            output = llm.chat(HI, params)[0].outputs[0]
            assert output.text == text
            assert output.token_ids[-1] == output.stop_reason == answer[-1]


def test_logprobs_belong_to_the_tokens_of_the_output(monkeypatch: pytest.MonkeyPatch) -> None:
    """A turn that repeats itself is cut, and its answer is forced. Tokens past the cut are discarded."""
    vocab = load_vocabulary()
    repeated = [CHANNEL, *vocab.encode("analysis"), MESSAGE, *vocab.encode(" again" * 3000)]
    answer = [*vocab.encode("Noon. It is"), RETURN]
    with scripted_llm(monkeypatch, repeated, answer, size=10_000, max_model_len=8192) as (llm, core):
        params = SamplingParams(max_tokens=5000, logprobs=0, stop=" It")
        output = llm.chat(HI, params)[0].outputs[0]
    assert len(core.requests) == 2
    assert (output.text, output.stop_reason) == ("Noon.", " It")
    assert len(output.token_ids) < len(repeated)
    assert output.logprobs is not None
    assert [next(iter(entry)) for entry in output.logprobs] == output.token_ids
    assert output.cumulative_logprob == -len(output.token_ids)


def test_a_turn_that_ends_after_its_reasoning_is_asked_for_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of the two choices gets a second round, as on the server."""
    vocab = load_vocabulary()
    thought = [CHANNEL, *vocab.encode("analysis"), MESSAGE, *vocab.encode("It is noon."), RETURN]
    answer = [*vocab.encode("Noon."), RETURN]
    with scripted_llm(monkeypatch, thought, answer) as (llm, core):
        (output,) = llm.chat(HI, SamplingParams(n=2, max_tokens=50, seed=3, logprobs=0))
    assert [(each.reasoning, each.text) for each in output.outputs] == [("It is noon.", "Noon.")] * 2
    assert [each.token_ids for each in output.outputs] == [[*thought, *answer]] * 2
    assert [each.finish_reason for each in output.outputs] == ["stop"] * 2
    first, *later = core.requests
    assert [each.sampling.seed for each in later] == [choice_seed(3, 0), choice_seed(3, 1)]
    header = [END, START, *vocab.encode("assistant"), CHANNEL, *vocab.encode("final"), MESSAGE]
    assert later[0].prompt_token_ids == [*first.prompt_token_ids, *thought[:-1], *header]
    assert later[0].sampling.max_tokens == 50 - len(thought)


def test_an_empty_answer_at_the_default_max_tokens_is_warned_of_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("chorale.llm.llm._warned", [])
    thought = [CHANNEL, *load_vocabulary().encode("analysis"), MESSAGE, *range(100, 120)]
    with scripted_llm(monkeypatch, thought) as (llm, _), caplog.at_level(logging.WARNING, "chorale"):
        llm.chat(HI, SamplingParams(max_tokens=15))
        assert "is empty" not in caplog.text
        for _ in range(2):
            assert llm.chat(HI, SamplingParams())[0].outputs[0].finish_reason == "length"
    assert caplog.text.count("is empty") == 1


def test_an_output_with_an_error_keeps_its_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = load_vocabulary().encode("one two three four")
    with scripted_llm(monkeypatch, ids) as (llm, core):
        step = core.step

        def failing() -> list[TokenChunk]:
            (chunk,) = step()
            if chunk.token_ids == ids[2:3]:
                core.abort(chunk.request_id)
                return [TokenChunk(chunk.request_id, 0, [], "error", error="not finite")]
            return [chunk]

        monkeypatch.setattr(core, "step", failing)
        output = llm.generate([[1]], SamplingParams(max_tokens=100))[0].outputs[0]
    assert (output.finish_reason, output.error, output.token_ids) == ("error", "not finite", ids[:2])


def test_the_bar_is_closed_when_the_engine_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    bar = Mock()

    def fail() -> None:
        raise EngineError("on fire")

    with scripted_llm(monkeypatch, [1]) as (llm, core):
        monkeypatch.setattr(core, "step", fail)
        with pytest.raises(EngineDeadError, match="on fire"):
            llm.generate([[1]], use_tqdm=lambda **_: bar)
    bar.close.assert_called_once_with()


def test_prompt_delay_is_unlimited_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """Offline output is not streamed, so a limit of the delay would only reduce throughput."""
    seen: list[float] = []

    def build_engine(config: EngineConfig, **_: object) -> None:
        seen.append(config.prompt_delay)
        raise ConfigError("seen")

    monkeypatch.setattr(build, "build_engine", build_engine)
    for options in ({}, {"prompt_delay": None}, {"prompt_delay": 0.25}):
        with pytest.raises(ConfigError, match="seen"):
            LLM(**options)
    assert seen == [0.0, 0.0, 0.25]


@pytest.mark.parametrize(
    ("messages", "error"),
    [
        ("Hi", TypeError),
        (["Hi"], TypeError),
        ([{"role": "user", "content": "Hi"}, "Hi"], TypeError),
        (None, TypeError),
        ([[]], ValueError),
        ([[{"role": "user", "content": "Hi"}], []], ValueError),
    ],
)
def test_bad_messages_are_an_error(llm: LLM, messages: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=r"list of dictionaries|at least one message"):
        llm.chat(messages, SamplingParams(max_tokens=1))


def test_an_empty_batch_has_no_outputs(llm: LLM) -> None:
    assert llm.generate([]) == []
    assert llm.chat([]) == []


def test_a_tool_that_is_not_an_object_is_an_error(llm: LLM) -> None:
    with pytest.raises(ValueError, match="tools"):
        llm.chat([{"role": "user", "content": "Hi"}], tools=["add"])  # type: ignore[list-item]


@pytest.mark.parametrize("params", [{"temperature": 1}, [{"temperature": 1}], 5])
def test_sampling_params_of_another_type_are_an_error(llm: LLM, params: Any) -> None:
    with pytest.raises(TypeError, match="must be a SamplingParams"):
        llm.generate(["a"], params)


def test_chat_without_max_tokens_runs_to_the_context_length(llm: LLM) -> None:
    output = llm.chat([{"role": "user", "content": "Hi " * 400}])[0]
    choice = output.outputs[0]
    assert choice.finish_reason == "stop" or len(output.prompt_token_ids) + len(choice.token_ids) == 512


# --------------------------------------------------------------------------- arguments


@pytest.mark.parametrize(
    ("given", "error", "word"),
    [
        ({"temprature": 1.0}, TypeError, "temperature"),
        ({"guided_decoding": {"regex": "a"}}, ValueError, "structured_outputs"),
        ({"structured_outputs": {}}, ValueError, "exactly one"),
        ({"structured_outputs": "yes|no"}, TypeError, "structured_outputs must be"),
        ({"structured_outputs": {"jsn": {}}}, TypeError, "jsn"),
        ({"structured_outputs": {"regex": "a"}, "min_tokens": 2}, ValueError, "min_tokens"),
        ({"structured_outputs": {"regex": "a"}, "ignore_eos": True}, ValueError, "ignore_eos"),
        ({"structured_outputs": {"regex": "a"}, "allowed_token_ids": [5]}, ValueError, "allowed_token_ids"),
        ({"temperature": float("nan")}, ValueError, "temperature"),
        ({"top_p": 0.0}, ValueError, "top_p"),
        ({"max_tokens": 0}, ValueError, "max_tokens"),
        ({"min_tokens": 5, "max_tokens": 4}, ValueError, "min_tokens"),
        ({"stop": [""]}, ValueError, "empty"),
        ({"stop": "x", "detokenize": False}, ValueError, "detokenize"),
        ({"temperature": None}, TypeError, "temperature"),
        ({"seed": 1.5}, TypeError, "seed"),
        ({"logit_bias": {5: None}}, TypeError, "logit_bias"),
        ({"logit_bias": [5]}, TypeError, "logit_bias"),
        ({"stop": [1]}, TypeError, "stop"),
        ({"stop": 1}, TypeError, "stop"),
        ({"bad_words": "word"}, TypeError, "bad_words"),
        ({"bad_words": ["word", ""]}, ValueError, "bad_words"),
        ({"stop_token_ids": 5}, TypeError, "stop_token_ids"),
        ({"logprobs": -1}, ValueError, "logprob_token_ids"),
        ({"logprob_token_ids": list(range(129))}, ValueError, "128"),
        ({"logprob_token_ids": [1, 2], "logprobs": 3}, ValueError, "logprobs"),
        ({"stream_interval": 0}, ValueError, "stream_interval"),
        ({"thinking_token_budget": 5}, ValueError, "thinking_token_budget"),
    ],
)
def test_a_bad_sampling_parameter_is_named(given: dict[str, Any], error: type[Exception], word: str) -> None:
    with pytest.raises(error, match=word):
        SamplingParams(**given)


def test_unsupported_parameters_may_be_none() -> None:
    """Callers may pass all of vLLM's parameters with None for the unused ones."""
    refused = ("guided_decoding", "logits_processors", "best_of", "extra_args")
    assert SamplingParams(**dict.fromkeys(refused)) == SamplingParams()


def test_sampling_params_compare_and_print_by_value() -> None:
    assert SamplingParams(top_k=-1) == SamplingParams(top_k=-1, structured_outputs=None)
    assert repr(SamplingParams(top_p=0.5, stop="x")) == "SamplingParams(top_p=0.5, stop='x')"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("stop_token_ids", [201088]),
        ("stop_token_ids", [1.5]),
        ("logprob_token_ids", [201088]),
        ("allowed_token_ids", []),
        ("logit_bias", {"5": 1.0}),
        ("logit_bias", {5: float("nan")}),
        ("logit_bias", {5: 1e7}),
    ],
)
def test_parameters_that_the_engine_refuses_are_errors_at_once(llm: LLM, name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=name):
        llm.generate([[1], [2]], [SamplingParams(), SamplingParams(**{name: value})])


def test_numpy_numbers_are_converted_to_python_numbers(llm: LLM) -> None:
    given = {"seed": np.int64(7), "temperature": np.float32(0.5), "max_tokens": np.int32(4)}
    params = SamplingParams(**given, logit_bias={np.int64(100): np.float32(5.0)})
    assert params == SamplingParams(seed=7, temperature=0.5, max_tokens=4, logit_bias={100: 5.0})
    assert len(llm.generate([[1]], params)[0].outputs[0].token_ids) == 4


@pytest.mark.parametrize(
    ("option", "value", "error"),
    [
        ("scheduling_policy", "prority", ConfigError),
        ("max_model_len", "4k", ConfigError),
        ("gpu_memory_utilization", 1.5, ConfigError),
        ("override_generation_config", {"temprature": 1.0}, TypeError),
        ("override_generation_config", {"temperature": -1.0}, ValueError),
    ],
)
def test_a_bad_option_of_llm_is_named(folder: Path, option: str, value: Any, error: type[Exception]) -> None:
    word = "temp" if isinstance(value, dict) else option
    with pytest.raises(error, match=word.replace("_", "[-_]")):
        LLM(str(folder), **{**OPTIONS, option: value})


def test_the_generation_config_sets_default_parameters(folder: Path) -> None:
    own = {"temperature": 0.5, "top_k": 7.0, "presence_penalty": 1.5, "max_new_tokens": 3}
    expected = SamplingParams(temperature=0.5, top_k=7, presence_penalty=1.5, max_tokens=3)
    with LLM(str(folder), **OPTIONS, override_generation_config=own) as made:
        assert made.get_default_sampling_params() == expected
        chat = made.chat([{"role": "user", "content": "Hi"}])
        for output in (*made.generate([[1]]), *chat):
            assert len(output.outputs[0].token_ids) <= 3


def test_more_logprobs_than_max_logprobs_are_an_error(folder: Path) -> None:
    with LLM(str(folder), **OPTIONS, max_logprobs=2) as made:
        assert made.generate([[1]], SamplingParams(logprobs=2, max_tokens=1))[0].outputs[0].logprobs
        for name in ("logprobs", "prompt_logprobs"):
            with pytest.raises(ValueError, match=f"{name} must be at most 2"):
                made.generate([[1]], SamplingParams(**{name: 3}))


def test_unknown_arguments_fail_and_unused_ones_warn(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(TypeError, match="max_model_len"):
        LLM(str(folder), max_model_length=100)
    with (
        caplog.at_level(logging.WARNING, "chorale"),
        LLM(str(folder), **OPTIONS, trust_remote_code=True) as made,
    ):
        assert "trust_remote_code has no effect" in caplog.text
        made.shutdown()  # leaving the context shuts down again
        with pytest.raises(EngineDeadError, match="shut down"):
            made.generate([[1]])
    with pytest.raises(ConfigError):
        LLM(str(folder / "nothing"))
