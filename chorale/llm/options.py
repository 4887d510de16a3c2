"""The arguments of ``LLM`` and ``SamplingParams`` for editors and for ``help()``.

Names, types and defaults are those of ``EngineConfig``, meanings those of the flags of ``chorale serve``.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, TypedDict

from chorale.config.adapters import LoraModule
from chorale.config.engine import EngineConfig, LogprobsMode
from chorale.config.kv_events import KvEventsConfig
from chorale.config.options.flags import FLAGS
from chorale.config.profiler import ProfilerConfig
from chorale.config.speculative import SpeculativeConfig
from chorale.config.weight_transfer import WeightTransferConfig


class EngineOptions(TypedDict, total=False):
    """Every argument of ``LLM`` except ``model``; editors read it. None means: let Chorale decide."""

    data_parallel_size: int
    revision: str | None
    download_dir: str | None
    device: Literal["auto", "cpu", "cuda", "rocm", "npu"]
    dtype: Literal["auto", "float32", "bfloat16"]
    ops: Literal["auto", "reference", "cpu", "triton"]
    cpu_precision: Literal["auto", "int8", "exact"]
    batch_invariant: bool
    seed: int
    max_model_len: int | None
    max_num_seqs: int | None
    max_num_active_seqs: int | None
    max_num_batched_tokens: int | None
    max_num_scheduled_tokens: int | None
    prefill_schedule_interval: int
    long_prefill_token_threshold: int
    long_prefill_token_threshold_adaptive: bool
    watermark: float | None
    prompt_delay: float | None
    block_size: int | None
    num_gpu_blocks_override: int | None
    gpu_memory_utilization: float
    kv_cache_memory_bytes: int | None
    kv_offloading_size: float | None
    cpu_offload_params: Sequence[str] | None
    kv_cache_dtype: Literal["auto", "bfloat16", "float32", "fp8", "fp8_e4m3"]
    moe_activation_dtype: Literal["auto", "bfloat16", "fp8"]
    enable_prefix_caching: bool
    scheduling_policy: Literal["fcfs", "priority"]
    async_scheduling: bool | None
    tensor_parallel_size: int
    device_ids: Sequence[int | str]
    distributed_timeout_seconds: int | None
    enable_expert_parallel: bool | None
    disable_custom_all_reduce: bool
    enforce_eager: bool
    max_cudagraph_capture_size: int | None
    cudagraph_capture_sizes: Sequence[int] | None
    precompile_kernels: bool
    mixed_cuda_graphs: bool
    speculative_config: SpeculativeConfig | Mapping[str, Any] | None
    kv_events_config: KvEventsConfig | Mapping[str, Any] | None
    enable_lora: bool
    lora_modules: tuple[LoraModule, ...]
    max_loras: int
    max_lora_rank: int
    max_cpu_loras: int | None
    enable_sleep_mode: bool
    profiler_config: ProfilerConfig | Mapping[str, Any] | None
    weight_transfer_config: WeightTransferConfig | Mapping[str, Any] | None
    max_logprobs: int
    logprobs_mode: LogprobsMode
    enable_return_routed_experts: bool
    generation_config: Literal["auto", "none"]
    override_generation_config: Mapping[str, float] | None
    num_threads: int | None
    kv_cache_metrics: bool
    kv_cache_metrics_sample: float
    heartbeat_timeout: float


_OWN = {  # meanings that differ from those of the flags
    "model": "folder, Hugging Face id, or demo (the small model in the package)",
    "data_parallel_size": "number of engines (replicas), each a process with its own GPU or GPUs",
    "mixed_cuda_graphs": "capture small steps of prompts and rows together, if decode steps are captured",
    "enable_sleep_mode": "let sleep() release the device's memory, and wake_up() restore it",
    "prompt_delay": "seconds that prompts may add to a step with running rows; 0: no limit",
}
_DEFAULTS: dict[str, object] = {field.name: field.default for field in dataclasses.fields(EngineConfig)}
_DEFAULTS |= {"data_parallel_size": 1, "prompt_delay": 0.0}


def as_arguments(text: str) -> str:
    """Returns a text about flags with the names of arguments: ``--max-model-len`` -> ``max_model_len``."""

    def name(found: re.Match[str]) -> str:
        argument = found[1].replace("-", "_")
        return argument if argument in _DEFAULTS else found[0]

    return re.sub(r"--([a-z][a-z-]+)", name, text)


def engine_signature() -> inspect.Signature:
    """Returns the signature of ``LLM.__init__``."""
    own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    model = own.replace(name="model", default=_DEFAULTS["model"], annotation="str")
    keyword = model.replace(kind=inspect.Parameter.KEYWORD_ONLY)
    others = [
        keyword.replace(name=name, default=_DEFAULTS[name], annotation=kind.__forward_arg__)
        for name, kind in EngineOptions.__annotations__.items()
    ]
    return inspect.Signature([own, model, *others])


def engine_arguments() -> list[tuple[str, str, object, str]]:
    """Returns name, type, default and meaning of each argument of ``LLM``, for ``listed``."""
    flags = {flag.name.replace("-", "_"): flag for flag in FLAGS.values()}
    flags |= {flag.target.partition(".")[2]: flag for flag in FLAGS.values() if flag.target}
    return [
        (name, each.annotation, each.default, _OWN.get(name) or as_arguments(flags[name].help))
        for name, each in list(engine_signature().parameters.items())[1:]
    ]


def listed(rows: Iterable[tuple[str, str, object, str]]) -> str:
    """Returns rows of name, type, default and meaning as a part of a docstring."""
    lines = []
    for name, kind, default, meaning in rows:
        lines += [f"{name}: {kind} = {default!r}", textwrap.indent(textwrap.fill(meaning, 96), "    ")]
    return "\n".join(lines)
