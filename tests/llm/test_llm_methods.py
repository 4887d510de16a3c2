"""The methods of ``LLM`` beside ``generate`` and ``chat``, and the parameters of RL trainers."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from chorale import LLM, LoRARequest, SamplingParams
from chorale.errors import ConfigError, ConflictError
from chorale.llm.metrics import Counter, Gauge, Histogram, Metric, Vector
from chorale.llm.outputs import FlatLogprobs, RequestOutput
from chorale.llm.params import RequestOutputKind
from chorale.measure.bench.checkpoint_writer import write_random_checkpoint
from chorale.model.config import ModelConfig
from tests.llm.test_llm import OPTIONS

MESSAGES = [{"role": "user", "content": "Hi <|end|>"}]
GREEDY = SamplingParams(temperature=0, max_tokens=6)


@pytest.fixture(autouse=True)
def _awake_and_idle_afterwards(llm: LLM) -> Iterator[None]:
    yield
    llm.wake_up()
    llm.wait_for_completion()


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def metric(metrics: list[Metric], kind: type[Any], name: str, **labels: str) -> Any:
    [found] = [each for each in metrics if each.name == name and labels.items() <= each.labels.items()]
    assert type(found) is kind
    return found


# --------------------------------------------------------------------------- the queue


def test_enqueued_prompts_run_when_they_are_waited_for(llm: LLM) -> None:
    wanted = llm.generate(["Hello", "World"], GREEDY) + llm.chat(MESSAGES, GREEDY)
    ids = llm.enqueue(["Hello", "World"], GREEDY) + llm.enqueue_chat(MESSAGES, GREEDY)
    outputs = llm.wait_for_completion(use_tqdm=False)
    assert [output.request_id for output in outputs] == ids
    assert tokens(outputs) == tokens(wanted)
    assert llm.wait_for_completion() == []


def test_a_bad_prompt_adds_none_of_its_list_to_the_queue(llm: LLM) -> None:
    with pytest.raises(ValueError, match="empty"):
        llm.enqueue([[1], []], GREEDY)
    assert llm.wait_for_completion() == []


@pytest.mark.parametrize(
    ("mode", "reasons"), [("keep", ["length"]), ("wait", ["length"]), ("abort", ["abort"])]
)
def test_a_sleep_ends_keeps_or_awaits_the_queue(llm: LLM, mode: Any, reasons: list[str]) -> None:
    llm.enqueue("Hello", GREEDY)
    llm.sleep(level=0, mode=mode)
    llm.enqueue("World", GREEDY)
    with pytest.raises(ConflictError, match="wake_up"):
        llm.wait_for_completion()
    assert llm.wake_up(tags=["scheduling"])
    found = [output.outputs[0].finish_reason for output in llm.wait_for_completion()]
    assert found == [*reasons, "length"]


def test_no_prompt_runs_while_the_engine_sleeps(llm: LLM) -> None:
    llm.sleep(level=0)
    with pytest.raises(ConflictError, match="wake_up"):
        llm.generate("Hello", GREEDY)
    assert llm.wake_up() is True
    assert len(tokens(llm.generate("Hello", GREEDY))[0]) == 6


def test_errors_of_administration_name_arguments(llm: LLM) -> None:
    for call, words in (
        (lambda: llm.sleep(level=3), "level"),
        (lambda: llm.sleep(mode="now"), "mode"),  # type: ignore[arg-type]
        (lambda: llm.wake_up(["weigths"]), "weigths"),
        (lambda: llm.wake_up("weights"), "list"),
        (lambda: llm.start_profile("a"), "profile_prefix"),
    ):
        with pytest.raises(ValueError, match=words):
            call()
    with pytest.raises(ConflictError, match=r"^[^-]*$|enable_sleep_mode"):
        llm.sleep(level=1)


def test_a_command_waits_for_the_call_of_another_thread(llm: LLM) -> None:
    began, order = threading.Event(), list[str]()

    def run() -> None:
        llm._engine.run([], lambda _: [])  # so that the thread is known to work before the lock is taken
        began.set()
        llm.generate(["Hello"] * 8, SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))
        order.append("call")

    thread = threading.Thread(target=run)
    thread.start()
    assert began.wait(60)
    assert llm.reset_prefix_cache() is True
    thread.join(60)
    assert order == ["call"]


def test_resetting_the_prefix_cache_forgets_prompts(llm: LLM) -> None:
    prompt = {"prompt_token_ids": list(range(100, 164))}
    llm.generate(prompt, GREEDY)
    assert llm.generate(prompt, GREEDY)[0].num_cached_tokens > 0
    assert llm.reset_prefix_cache() is True
    assert llm.generate(prompt, GREEDY)[0].num_cached_tokens == 0


def test_the_small_methods_of_vllm(llm: LLM, folder: Path) -> None:
    assert llm.get_world_size() == llm.get_world_size(include_dp=False) == 1
    assert llm.reset_mm_cache() is None  # type: ignore[func-returns-value]
    with LLM.from_engine_args({"model": str(folder), **OPTIONS}) as other:
        assert other.info.max_model_len == OPTIONS["max_model_len"]


# --------------------------------------------------------------------------- metrics


def test_metrics_count_requests_tokens_and_times(folder: Path) -> None:
    with LLM(str(folder), **OPTIONS) as llm:
        llm.generate([[5] * 7, [6] * 9], SamplingParams(n=2, max_tokens=4, ignore_eos=True))
        found = llm.get_metrics()
    assert metric(found, Counter, "vllm:prompt_tokens").value == 16
    assert metric(found, Counter, "vllm:generation_tokens").value == 16
    assert metric(found, Counter, "vllm:request_success", finished_reason="length").value == 4
    assert metric(found, Gauge, "vllm:num_requests_running").value == 0.0
    prompts = metric(found, Histogram, "vllm:request_prompt_tokens")
    assert (prompts.count, prompts.sum, prompts.buckets["5.0"], prompts.buckets["+Inf"]) == (2, 16.0, 0, 2)
    assert metric(found, Histogram, "vllm:iteration_tokens_total").sum == 16 + 16
    for name in ("time_to_first_token", "e2e_request_latency", "request_decode_time"):
        times = metric(found, Histogram, f"vllm:{name}_seconds")
        assert times.count == 4
        assert 0 <= times.sum < 600
    assert {each.labels["model_name"] for each in found} == {str(folder)}
    assert not any(isinstance(each, Vector) for each in found)  # without drafts


# --------------------------------------------------------------------------- parameters


def test_named_tokens_have_the_log_probabilities_of_the_whole_distribution(llm: LLM) -> None:
    many = llm.generate("Hello", SamplingParams(temperature=0, max_tokens=3, logprobs=20))[0].outputs[0]
    assert many.logprobs is not None
    first = list(many.logprobs[0] or {})
    ids = [first[7], first[2], 3]
    params = SamplingParams(temperature=0, max_tokens=3, logprob_token_ids=ids)
    few = llm.generate("Hello", params)[0].outputs[0]
    assert few.token_ids == many.token_ids
    assert few.logprobs is not None
    position = few.logprobs[0] or {}
    assert list(position) == [many.token_ids[0], *ids]
    for token in ids[:2]:
        assert math.isclose(position[token].logprob, (many.logprobs[0] or {})[token].logprob, abs_tol=1e-6)
        assert position[token].rank is None
    assert position[3].logprob < (many.logprobs[0] or {})[first[-1]].logprob


def test_flat_logprobs_have_the_values_of_dictionaries(llm: LLM) -> None:
    given: dict[str, Any] = {"temperature": 0, "max_tokens": 3, "logprobs": 2, "prompt_logprobs": 1}
    [usual], [flat] = (
        llm.generate([[5, 6, 7]], SamplingParams(**given, flat_logprobs=flag)) for flag in (False, True)
    )
    for one, other in (
        (flat.outputs[0].logprobs, usual.outputs[0].logprobs),
        (flat.prompt_logprobs, usual.prompt_logprobs),
    ):
        assert isinstance(one, FlatLogprobs)
        assert list(one) == other
        assert list(one[1:]) == (other or [])[1:]
        assert len(one.token_ids) == one.end_indices[-1] == len(one.decoded_tokens)


def test_a_prompt_that_skips_the_cache_is_computed_and_cached(llm: LLM) -> None:
    prompt = {"prompt_token_ids": list(range(300, 364))}
    skipping = SamplingParams(temperature=0, max_tokens=4, skip_reading_prefix_cache=True)
    first = llm.generate(prompt, skipping)[0]
    again = llm.generate(prompt, skipping)[0]
    usual = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=4))[0]
    assert first.num_cached_tokens == again.num_cached_tokens == 0 < usual.num_cached_tokens
    assert tokens([again]) == tokens([usual])


def test_parameters_can_be_assigned_and_are_checked() -> None:
    params = SamplingParams(output_kind=RequestOutputKind.FINAL_ONLY, stream_interval=2, skip_clone=True)
    copy = params.clone()
    copy.max_tokens = 100
    copy.stop = ["x"]
    assert (params.max_tokens, params.stop, copy.max_tokens) == (16, None, 100)
    with pytest.raises(ValueError, match="temperature"):
        copy.temperature = -1.0
    with pytest.raises(TypeError, match="max_tokens"):
        copy.max_token = 5  # type: ignore[attr-defined]
    assert copy == SamplingParams(
        max_tokens=100,
        stop=["x"],
        output_kind=RequestOutputKind.FINAL_ONLY,
        stream_interval=2,
        skip_clone=True,
    )


def test_from_optional_reads_the_server_s_form() -> None:
    found = SamplingParams.from_optional(
        temperature=None, top_p=0.5, max_tokens=None, logit_bias={"5": 200.0, 6: -1}, seed=-1
    )
    assert found == SamplingParams(top_p=0.5, max_tokens=None, logit_bias={5: 100.0, 6: -1.0})
    with pytest.raises(ValueError, match="logit_bias"):
        SamplingParams.from_optional(logit_bias={"five": 1.0})


# --------------------------------------------------------------------------- arguments of vLLM


def test_a_chat_takes_the_arguments_of_a_template(llm: LLM) -> None:
    options = {"reasoning_effort": "high", "model_identity": "You are a test."}
    found = llm.chat(MESSAGES, GREEDY, chat_template_kwargs=options, add_generation_prompt=True)[0]
    assert found.prompt_token_ids == llm.get_tokenizer().apply_chat_template(
        MESSAGES, add_generation_prompt=True, **options
    )
    for given, error in (
        ({"chat_template_kwargs": {"enable_thinking": True}}, TypeError),
        ({"chat_template": "{{ x }}"}, ValueError),
        ({"add_generation_prompt": False}, ValueError),
        ({"lora_request": [object()]}, TypeError),
        ({"tool": []}, TypeError),
    ):
        with pytest.raises(error, match=next(iter(given))):
            llm.chat(MESSAGES, GREEDY, **given)
    with pytest.raises(ValueError, match="enable_lora"):
        llm.generate("Hello", GREEDY, lora_request=LoRARequest("a", 1, "/a"))


def test_an_argument_of_vllm_s_server_is_treated_as_its_flag(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with LLM(str(folder), **OPTIONS, quantization="mxfp4", runner="auto", lora_dtype=None) as llm:  # type: ignore[call-arg]
        assert llm.info.vocab_size == 201088
    assert "quantization has no effect" in caplog.text
    with pytest.raises(ConfigError, match=r"^LLM: lora_target_modules is not supported"):
        LLM(str(folder), lora_target_modules=["q"])  # type: ignore[call-arg]


# --------------------------------------------------------------------------- new weights


def test_new_weights_give_the_tokens_of_an_engine_started_with_them(folder: Path, tmp_path: Path) -> None:
    """A refused update leaves the old ones."""
    new = write_random_checkpoint(tmp_path / "new", ModelConfig.load(folder), seed=11)
    with LLM(str(new), **OPTIONS) as other:
        wanted = tokens(other.generate([[1, 2, 3]], GREEDY))
    transfer = {"backend": "checkpoint", "allowed_folders": [str(tmp_path)]}
    with LLM(str(folder), weight_transfer_config=transfer, **OPTIONS) as llm:
        old = tokens(llm.generate([[1, 2, 3]], GREEDY))
        llm.init_weight_transfer_engine({"init_info": {}})
        llm.start_weight_update()
        with pytest.raises(ConflictError):
            llm.update_weights({"update_info": {"path": str(tmp_path / "missing")}})
        assert (llm.get_weight_version(), tokens(llm.generate([[1, 2, 3]], GREEDY))) == ("default", old)
        llm.start_weight_update()
        llm.update_weights({"update_info": {"path": str(new)}})
        llm.finish_weight_update("second")
        assert (llm.get_weight_version(), tokens(llm.generate([[1, 2, 3]], GREEDY))) == ("second", wanted)
        llm.update_weight_version("third")
        assert llm.get_weight_version() == "third"
    assert old != wanted
