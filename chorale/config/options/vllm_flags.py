"""vLLM's flags and variables that have no effect here, each with its treatment and the reason.

The treatments are *not needed* (Chorale always works that way), *no effect* (not supported, but the server
works without it), and *refused* (the server would not do what was requested). Each flag produces one line for
the operator, unless its value requests nothing.
"""

from __future__ import annotations

from typing import Any

from chorale.config.engine import NO_STAGES
from chorale.config.options.values import Effect, Flag, Kind


def _flags(
    effect: Effect,
    note: str,
    names: str,
    *,
    kind: Kind = "str",
    harmless: tuple[Any, ...] = (),
    always: bool = False,
) -> tuple[Flag, ...]:
    """Returns flags with a common treatment. ``names``: the flags' names, separated by spaces."""
    return tuple(
        Flag(name, kind, effect=effect, note=note, harmless=harmless, always=always) for name in names.split()
    )


_ONE_MACHINE = "a server runs on one machine"
_HARMONY = "Chorale parses and renders harmony itself"
_KERNELS = "Chorale picks its own kernels; see --ops"
_COMPILE = "there is no torch.compile stage to configure"
_TEXT = "gpt-oss reads text only"
_ADAPTERS = "adapters are not supported; requests for them would fail"
_NODES = "a server runs on one machine"
_LOADING = "weights are read in parallel, directly to the device"

# Other devices and their state of support.
_UNSUPPORTED = "there is no back end for {}; use --device cpu"
DEVICES = {
    **dict.fromkeys(("hip", "amd"), "for AMD GPUs, use --device rocm"),
    "ascend": "for Ascend NPUs, use --device npu",
    **dict.fromkeys(("xpu", "intel"), _UNSUPPORTED.format("Intel GPUs")),
    **dict.fromkeys(("mps", "metal"), _UNSUPPORTED.format("Apple GPUs")),
    "tpu": _UNSUPPORTED.format("TPUs"),
    "hpu": _UNSUPPORTED.format("Gaudi"),
    "neuron": _UNSUPPORTED.format("Neuron"),
    "gpu": "for NVIDIA GPUs, use --device cuda",
}

# fmt: off
_NOT_NEEDED: tuple[Flag, ...] = (
    *_flags("not needed", _HARMONY,
            "tool-call-parser reasoning-parser reasoning-parser-plugin tool-parser-plugin "
            "chat-template-content-format tokenizer tokenizer-mode tokenizer-revision"),
    *_flags("not needed", _HARMONY, "reasoning-config", kind="json"),
    *_flags("not needed", _HARMONY, "skip-tokenizer-init enable-reasoning", kind="bool"),
    *_flags("not needed", "always on",
            "enable-auto-tool-choice enable-chunked-prefill enable-prompt-tokens-details "
            "enable-server-load-tracking scheduler-reserve-full-isl", kind="bool", always=True),
    *_flags("not needed", "no remote code is ever run", "trust-remote-code", kind="bool"),
    *_flags("not needed", "no remote code is ever run", "code-revision"),
    *_flags("not needed", _KERNELS, "moe-backend attention-backend mm-encoder-attn-backend linear-backend"),
    *_flags("not needed", _KERNELS, "attention-config kernel-config", kind="json"),
    *_flags("not needed", _KERNELS, "disable-cascade-attn enable-flashinfer-autotune", kind="bool"),
    *_flags("not needed", _COMPILE, "performance-mode"),
    *_flags("not needed", "the checkpoint determines its quantization",
            "quantization config-format hf-config-path"),
    *_flags("not needed", "one model family, one way to run it", "task runner convert model-impl"),
    *_flags("not needed", _TEXT, "limit-mm-per-prompt mm-processor-kwargs media-io-kwargs", kind="json"),
    *_flags("not needed", _TEXT,
            "mm-processor-cache-gb mm-processor-cache-type allowed-local-media-path mm-encoder-tp-mode"),
    *_flags("not needed", _TEXT, "allowed-media-domains", kind="list"),
    *_flags("not needed", _TEXT,
            "language-model-only enable-mm-embeds disable-chunked-mm-input skip-mm-profiling "
            "interleave-mm-strings disable-mm-preprocessor-cache", kind="bool"),
    *_flags("not needed", _LOADING,
            "safetensors-load-strategy max-parallel-loading-workers pt-load-map-location"),
    *_flags("not needed", _LOADING, "model-loader-extra-config", kind="json"),
    *_flags("not needed", _LOADING, "ignore-patterns", kind="list"),
    *_flags("not needed", "progress is always shown", "use-tqdm-on-load", kind="bool"),
    *_flags("not needed", "all structured output uses llguidance", "guided-decoding-backend"),
    *_flags("not needed", "all structured output uses llguidance", "structured-outputs-config", kind="json"),
    *_flags("not needed", "the scheduler decides by itself",
            "max-num-partial-prefills max-long-partial-prefills "
            "num-scheduler-steps scheduler-delay-factor preemption-mode scheduler-cls"),
    *_flags("not needed", "prefix hashes always use keyed BLAKE2", "prefix-caching-hash-algo"),
    *_flags("not needed", "there is one KV cache, a hybrid one", "disable-hybrid-kv-cache-manager",
            kind="bool"),
    *_flags("not needed", "fp8 keys and values need no scales here", "calculate-kv-scales", kind="bool"),
    *_flags("not needed", "see --max-cudagraph-capture-size", "max-seq-len-to-capture"),
    *_flags("not needed", "always the case",
            "disable-frontend-multiprocessing use-v2-block-manager aggregate-engine-logging "
            "fail-on-environ-validation", kind="bool"),
    *_flags("not needed", "the text of requests is never logged", "disable-log-requests", kind="bool"),
    *_flags("not needed", "the text of requests is never logged", "max-log-len"),
    *_flags("not needed", "engines exchange nothing", "disable-nccl-for-dp-synchronization", kind="bool"),
)
# fmt: on

# fmt: off
_NO_EFFECT: tuple[Flag, ...] = (
    *_flags("no effect", "prompts are in harmony format; templates are not used", "chat-template"),
    *_flags("no effect", "requests cannot contain templates", "trust-request-chat-template", kind="bool"),
    *_flags("no effect", "the role of an answer is assistant", "response-role", harmless=("assistant",)),
    *_flags("no effect", "weights are read from safetensors", "load-format",
            harmless=("auto", "safetensors", "hf")),
    *_flags("no effect", "ranks are processes of one machine (mp)", "distributed-executor-backend",
            harmless=("mp", "uni")),
    *_flags("no effect", _ONE_MACHINE,
            "data-parallel-address data-parallel-rpc-port "
            "all2all-backend ubatch-size worker-cls worker-extension-cls", harmless=("mp", "uni")),
    *_flags("no effect", _ONE_MACHINE, "eplb-config", kind="json"),
    *_flags("no effect", _ONE_MACHINE,
            "enable-eplb enable-dbo data-parallel-hybrid-lb data-parallel-external-lb numa-bind",
            kind="bool"),
    *_flags("no effect", "weights stay on their device", "cpu-offload-gb", harmless=("0",)),
    *_flags("no effect", "weights stay on their device; for KV see --kv-offloading-size",
            "offload-config", kind="json"),
    *_flags("no effect", "config.json is used unchanged", "hf-overrides additional-config rope-scaling",
            kind="json"),
    *_flags("no effect", "config.json is used unchanged", "rope-theta"),
    *_flags("no effect", "prompts are text or token ids", "enable-prompt-embeds", kind="bool"),
    *_flags("no effect", "the text of requests is never logged", "enable-log-requests", kind="bool"),
    *_flags("no effect", "answers are not logged", "enable-log-outputs enable-log-deltas", kind="bool"),
    *_flags("no effect", "there is no such endpoint", "enable-offline-docs", kind="bool"),
    *_flags("no effect", "see chorale bench and /metrics", "show-hidden-metrics-for-version"),
    *_flags("no effect", "traces have the times in the queue, prefill and decode; workers have no spans",
            "collect-detailed-traces"),
    *_flags("no effect", "see chorale bench and /metrics",
            "cudagraph-metrics enable-mfu-metrics "
            "enable-layerwise-nvtx-tracing enable-logging-iteration-details", kind="bool"),
    *_flags("no effect", "see --uvicorn-log-level and --log-format", "log-config-file"),
    *_flags("no effect", "see --disable-uvicorn-access-log", "disable-access-log-for-endpoints"),
    *_flags("no effect", "calls are prevented by a grammar; the tools stay in the prompt",
            "exclude-tools-when-tool-choice-none", kind="bool"),
    *_flags("no effect", "set HF_TOKEN instead, so that the token is not visible in process lists",
            "hf-token"),
)
# fmt: on

# fmt: off
_REFUSED: tuple[Flag, ...] = (
    *_flags("refused", NO_STAGES,
            "pipeline-parallel-size decode-context-parallel-size prefill-context-parallel-size",
            kind="int", harmless=(1,)),
    *_flags("refused", _ADAPTERS, "enable-lora enable-prompt-adapter", kind="bool"),
    *_flags("refused", _ADAPTERS, "lora-modules", kind="list"),
    *_flags("no effect", _ADAPTERS, "max-loras max-lora-rank max-cpu-loras lora-dtype"),
    *_flags("refused", "there is no disaggregated prefill; for KV in host memory, see --kv-offloading-size",
            "kv-transfer-config ec-transfer-config", kind="json"),
    *_flags("refused", _NODES, "headless", kind="bool"),
    *_flags("refused", _NODES, "nnodes", harmless=("1",)),
    *_flags("refused", _NODES, "node-rank data-parallel-rank data-parallel-start-rank", harmless=("0",)),
    *_flags("no effect", _NODES, "master-addr master-port"),
    *_flags("refused", "external code is not loaded into the server; use a proxy", "middleware"),
    *_flags("refused", "external code is not loaded into the engine", "logits-processors", kind="list"),
    *_flags("refused", "gRPC is not supported", "grpc", kind="bool"),
    *_flags("refused", "only the complete server is supported", "tokens-only", kind="bool"),
    *_flags("refused", "the model's sliding-window layers require it", "disable-sliding-window", kind="bool"),
)
# fmt: on

KNOWN_FLAGS: tuple[Flag, ...] = (*_NOT_NEEDED, *_NO_EFFECT, *_REFUSED)

# Variables that Kubernetes sets for a service named "vllm": ignored without a notice.
SILENT_FAMILIES = ("VLLM_PORT", "VLLM_SERVICE_")

# vLLM's variables with a specific reason. Others without effect are listed as "not read".
KNOWN_ENVIRONMENT = {
    "VLLM_USE_FLASHINFER_MOE_MXFP4_MXFP8": f"{_KERNELS} (fp8 inputs: --moe-activation-dtype fp8)",
    "VLLM_ATTENTION_BACKEND": _KERNELS,
    "VLLM_MXFP4_USE_MARLIN": _KERNELS,
    "VLLM_ENABLE_RESPONSES_API_STORE": "the response store is always on",
    "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "the checkpoint's context length is the limit",
    "VLLM_USE_V1": "there is one engine",
    "VLLM_WORKER_MULTIPROC_METHOD": "ranks are started as new processes",
    "VLLM_NO_USAGE_STATS": "no usage statistics are collected",
    "VLLM_DO_NOT_TRACK": "no usage statistics are collected",
}
# Prefixes of other vendors' variables.
_ASCEND = "the plain torch ops of --device npu have no such choice"
OTHER_VENDORS = {
    "VLLM_ROCM": f"{_KERNELS}, on AMD GPUs too",
    "VLLM_ASCEND": _ASCEND,
    "USE_OPTIMIZED_MODEL": _ASCEND,
    "TRITON_HIP_PRESHUFFLE_SCALES": _KERNELS,
    "VLLM_USE_MODELSCOPE": "it has no effect, and only the Hugging Face hub is supported",
    **dict.fromkeys(
        ("HSA_NO_SCRATCH_RECLAIM", "AMDGCN_USE_BUFFER_OPS", "NPU_MEMORY_FRACTION", "TASK_QUEUE_ENABLE"),
        "torch, Triton or the driver may read it",
    ),
}
# Prefixes of variables with a common reason.
KNOWN_FAMILIES = {
    "VLLM_USE_FLASHINFER": _KERNELS,
    "VLLM_USE_TRTLLM": _KERNELS,
    "VLLM_FLASHINFER": _KERNELS,
    "VLLM_TORCH": _COMPILE,
}
