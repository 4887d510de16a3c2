"""The flags of ``chorale serve``: one table, vLLM's names.

Every entry either sets a field of ``EngineConfig`` / ``ServerConfig`` (``target``), is handled by the
command itself (``target`` starts with "cli."), or is known but not needed here (``note`` says why, and is
printed once when the flag is given). The argument parser, the YAML reader, ``chorale config show`` and the
docs read this table; nothing else knows a flag's name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["str", "int", "float", "bool", "list", "json", "size", "optional"]


@dataclass(frozen=True, slots=True)
class Flag:
    """One long flag. ``kind`` decides how a value is read, on the command line and in YAML alike."""

    name: str  # without the leading dashes
    kind: Kind
    target: str | None = None  # "engine.field", "server.field", "cli.name"; None: known, not needed
    help: str = ""
    aliases: tuple[str, ...] = ()
    choices: tuple[str, ...] = ()
    note: str = ""

    @property
    def takes_value(self) -> bool:
        return self.kind != "bool"


_SIZE = re.compile(r"^(-?\d+(?:\.\d+)?)\s*([kKmMgGtT]?)(i?[bB])?$")
_DECIMAL = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def parse_size(text: str) -> int | None:
    """``10k`` = 10,000, ``10K`` = 10,240, ``16GiB``; ``auto`` and ``-1`` mean "decide for me" (None).

    Raises ``ValueError`` on anything else, fractions of a token included.
    """
    if text.strip().lower() == "auto":
        return None
    match = _SIZE.match(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not a number (examples: 8192, 10k, 10K, 16GiB)")
    number, unit = match.group(1), match.group(2)
    scale = _BINARY.get(unit) or _DECIMAL[unit]
    if (match.group(3) or "").startswith("i"):
        scale = _BINARY[unit.upper()] if unit else 1
    value = float(number) * scale
    if value == -1:
        return None
    if value != int(value) or value < 0:
        raise ValueError(f"{text!r} is not a whole, non-negative number")
    return int(value)


def _parse_bool(text: str) -> bool:
    lowered = text.strip().lower()
    if lowered in ("true", "1", "yes", "on"):
        return True
    if lowered in ("false", "0", "no", "off"):
        return False
    raise ValueError(f"{text!r} is neither true nor false")


READERS: dict[Kind, Callable[[str], Any]] = {
    "str": str,
    "int": int,
    "float": float,
    "bool": _parse_bool,
    "list": str,
    "json": json.loads,
    "size": parse_size,
    "optional": str,
}


def read_value(flag: Flag, value: Any) -> Any:
    """A YAML or command-line value as the flag's own type. Raises ``ValueError`` with a readable reason."""
    if value is None:
        return None
    if flag.kind == "list":
        items = value if isinstance(value, list) else [value]
        return tuple(str(item) for item in items)
    if flag.kind == "json" and not isinstance(value, str):
        return value
    if flag.kind == "bool" and isinstance(value, bool):
        return value
    if isinstance(value, (bool, dict, list)):
        raise ValueError(f"{value!r} is not a {flag.kind}")
    read = READERS[flag.kind](str(value))
    if flag.choices and read not in flag.choices:
        raise ValueError(f"{read!r} is not one of {', '.join(flag.choices)}")
    return read


def _ignored(note: str, *names: str, kind: Kind = "str") -> tuple[Flag, ...]:
    return tuple(Flag(name, kind, note=note) for name in names)


MODEL_FLAGS = (
    Flag("model", "str", "engine.model", "folder, hub id, or demo (also the positional argument)"),
    Flag("revision", "str", "engine.revision", "branch, tag or commit on the hub"),
    Flag("download-dir", "str", "engine.download_dir", "where checkpoints are downloaded to"),
    Flag("device", "str", "engine.device", "where to run", choices=("auto", "cpu", "cuda")),
    Flag("dtype", "str", "engine.dtype", "dense weights and activations", aliases=("half",)),
    Flag("ops", "str", "engine.ops", "op back end", choices=("auto", "reference", "triton")),
    Flag("seed", "int", "engine.seed", "seeds of requests that bring none are drawn from this"),
    Flag(
        "generation-config",
        "str",
        "engine.generation_config",
        "auto: sampling defaults of the checkpoint; none: neutral ones",
        choices=("auto", "none", "vllm"),
    ),
    Flag("served-model-name", "list", "server.served_model_names", "names in the API; the first is echoed"),
    Flag("num-threads", "int", "engine.num_threads", "CPU threads of the reference ops"),
)

ENGINE_FLAGS = (
    Flag("max-model-len", "size", "engine.max_model_len", "longest prompt plus output, tokens"),
    Flag("max-num-seqs", "size", "engine.max_num_seqs", "sequences running at once"),
    Flag("max-num-batched-tokens", "size", "engine.max_num_batched_tokens", "tokens computed in one step"),
    Flag("block-size", "int", "engine.block_size", "tokens in a page of the KV cache"),
    Flag("num-gpu-blocks-override", "int", "engine.num_gpu_blocks_override", "pages in the KV pool, exactly"),
    Flag("gpu-memory-utilization", "float", "engine.gpu_memory_utilization", "share of the device's memory"),
    Flag("kv-cache-memory-bytes", "size", "engine.kv_cache_memory_bytes", "bytes of the KV pool"),
    Flag("kv-cache-dtype", "str", "engine.kv_cache_dtype", "auto, bfloat16, float32 or fp8"),
    Flag(
        "moe-activation-dtype",
        "str",
        "engine.moe_activation_dtype",
        "auto, bfloat16, or fp8: faster prefill and large batches on Hopper, less exact",
    ),
    Flag("enable-prefix-caching", "bool", "engine.enable_prefix_caching", "reuse the KV of common prefixes"),
    Flag(
        "scheduling-policy",
        "str",
        "engine.scheduling_policy",
        "who runs first",
        choices=("fcfs", "priority"),
    ),
    Flag("async-scheduling", "bool", "engine.async_scheduling", "plan the next step while one runs"),
    Flag("tensor-parallel-size", "int", "engine.tensor_parallel_size", "ranks", aliases=("tp",)),
    Flag("enforce-eager", "bool", "engine.enforce_eager", "no CUDA graphs"),
    Flag(
        "max-cudagraph-capture-size",
        "size",
        "engine.max_cudagraph_capture_size",
        "rows of the largest decode step that is captured; 0: no CUDA graphs",
    ),
    Flag(
        "cudagraph-capture-sizes",
        "list",
        "engine.cudagraph_capture_sizes",
        "rows of the decode steps that are captured",
        aliases=("cuda-graph-sizes",),
    ),
    Flag("max-logprobs", "int", "engine.max_logprobs", "most log-probabilities a request may ask for"),
    Flag("max-queued-requests", "size", "server.max_queued_requests", "waiting choices before 429"),
)

SERVER_FLAGS = (
    Flag("host", "str", "server.host", "address to listen on"),
    Flag("port", "int", "server.port", "port to listen on"),
    Flag("uds", "str", "server.uds", "listen on a unix socket instead"),
    Flag("root-path", "str", "server.root_path", "path prefix of a proxy in front"),
    Flag("api-server-count", "int", "server.api_server_count", "HTTP processes", aliases=("asc",)),
    Flag("api-key", "list", "cli.api_key", "keys that clients must send (better: CHORALE_API_KEY)"),
    Flag("api-key-file", "str", "cli.api_key_file", "file with one key a line"),
    Flag("stream-interval", "int", "server.stream_interval", "tokens per stream event after the first"),
    Flag("shutdown-timeout", "float", "server.shutdown_timeout", "seconds for running requests on SIGTERM"),
    Flag("ssl-keyfile", "str", "server.ssl_keyfile", "TLS private key"),
    Flag("ssl-certfile", "str", "server.ssl_certfile", "TLS certificate"),
    Flag("ssl-ca-certs", "str", "server.ssl_ca_certs", "TLS CA bundle"),
    Flag("allowed-origins", "json", "server.allowed_origins", "CORS origins, as JSON (off by default)"),
    Flag("allowed-methods", "json", "server.allowed_methods", "CORS methods, as JSON"),
    Flag("allowed-headers", "json", "server.allowed_headers", "CORS headers, as JSON"),
    Flag("allow-credentials", "bool", "server.allow_credentials", "CORS credentials"),
    Flag("enable-request-id-headers", "bool", "server.enable_request_id_headers", "echo X-Request-Id"),
    Flag("disable-fastapi-docs", "bool", "server.disable_docs", "no /docs and /openapi.json"),
    Flag(
        "uvicorn-log-level",
        "str",
        "server.log_level",
        "log level",
        aliases=("log-level",),
        choices=("debug", "info", "warning", "error"),
    ),
    Flag("disable-uvicorn-access-log", "bool", "cli.disable_access_log", "no access log"),
    Flag("h11-max-incomplete-event-size", "size", "server.max_header_bytes", "most bytes of headers"),
    Flag("h11-max-header-count", "int", "server.max_headers", "most headers"),
    Flag("max-body-bytes", "size", "server.max_body_bytes", "largest request body"),
    Flag(
        "response-store",
        "str",
        "server.response_store",
        "SQLite file for stored responses and conversations, :memory:, or postgresql://...",
    ),
    Flag(
        "response-store-max-items",
        "int",
        "server.response_store_max_items",
        "most stored responses and conversations",
    ),
    Flag("response-store-max-bytes", "size", "server.response_store_max_bytes", "most bytes of them"),
    Flag("response-store-ttl", "float", "server.response_store_ttl", "seconds that an unused one is kept"),
    Flag(
        "responses-dialect",
        "str",
        "server.responses_dialect",
        "what Responses call reasoning: OpenAI's names, those of openresponses.org, or the summary",
        choices=("openai", "open-responses", "summary"),
    ),
    Flag(
        "max-background-responses",
        "int",
        "server.max_background_responses",
        "background responses that may run at once",
    ),
    Flag("system-start-date", "str", "server.system_start_date", "pins the prompt's current date"),
    Flag(
        "reasoning-field",
        "str",
        "server.reasoning_field",
        "name of the reasoning text in Chat",
        choices=("both", "reasoning", "reasoning_content"),
    ),
    Flag("config", "str", "cli.config", "YAML file with these keys"),
)

TOOL_FLAGS = (
    Flag(
        "tool-server",
        "list",
        "tools.servers",
        "tools that run for the model: demo (browser and python), or HOST:PORT[,HOST:PORT] of MCP servers",
    ),
    Flag("mcp-config", "str", "tools.mcp_config", 'JSON file of MCP servers ({"mcpServers": ...})'),
    Flag("mcp-requests", "bool", "tools.mcp_requests", "requests may name MCP servers by address"),
    Flag(
        "tool-allow-private-hosts",
        "bool",
        "tools.allow_private_hosts",
        "requests and pages may reach private addresses",
    ),
    Flag(
        "browser-tool",
        "str",
        "tools.browser",
        "search service of the browser tool",
        choices=("none", "auto", "searxng", "exa", "you", "brave", "tavily", "offline"),
    ),
    Flag("browser-tool-url", "str", "tools.search_url", "address of the search service"),
    Flag("browser-tool-pages", "str", "tools.offline_pages", "folder of pages for the offline browser"),
    Flag("browser-tool-timeout", "float", "tools.fetch_timeout", "seconds of a page or a search"),
    Flag("browser-tool-bytes", "size", "tools.fetch_bytes", "largest page"),
    Flag(
        "python-tool",
        "str",
        "tools.python",
        "sandbox of the python tool",
        choices=("none", "auto", "gvisor", "docker", "podman", "bubblewrap", "dangerously_use_uv"),
    ),
    Flag("python-tool-image", "str", "tools.python_image", "container image of the python tool"),
    Flag("python-tool-timeout", "float", "tools.python_timeout", "seconds of a call"),
    Flag("python-tool-memory", "size", "tools.python_memory_bytes", "memory of a session"),
    Flag("python-tool-processes", "int", "tools.python_processes", "processes of a session"),
    Flag("python-tool-sessions", "int", "tools.python_sessions", "sessions at once"),
    Flag("python-tool-network", "bool", "tools.python_network", "code may use the network"),
    Flag("mcp-timeout", "float", "tools.call_timeout", "seconds of a call to an MCP server"),
)

KNOWN_FLAGS: tuple[Flag, ...] = (
    *_ignored(
        "always on: Chorale parses harmony itself",
        "tool-call-parser",
        "reasoning-parser",
        "tool-parser-plugin",
        "reasoning-config",
        "chat-template",
        "chat-template-content-format",
        "response-role",
        "default-chat-template-kwargs",
    ),
    *_ignored(
        "always on",
        "enable-auto-tool-choice",
        "enable-chunked-prefill",
        "enable-prompt-tokens-details",
        "enable-server-load-tracking",
        "enable-force-include-usage",
        kind="bool",
    ),
    *_ignored("nothing to trust: no remote code is ever run", "trust-remote-code", kind="bool"),
    *_ignored(
        "Chorale picks its own kernels; see --ops",
        "moe-backend",
        "attention-backend",
        "quantization",
        "load-format",
        "tokenizer",
        "tokenizer-mode",
        "config-format",
        "safetensors-load-strategy",
        "task",
        "runner",
        "convert",
        "model-impl",
        "hf-config-path",
        "code-revision",
        "tokenizer-revision",
        "logprobs-mode",
        "mm-processor-cache-gb",
    ),
    *_ignored(
        "there is no torch.compile stage to configure",
        "optimization-level",
        "performance-mode",
    ),
    *_ignored("there is no torch.compile stage to configure", "compilation-config", kind="json"),
    *_ignored(
        "speculative decoding is not served yet: running without drafts",
        "speculative-config",
        kind="json",
    ),
    *_ignored(
        "one engine on one device is served now",
        "data-parallel-size",
        "pipeline-parallel-size",
        "distributed-executor-backend",
        "data-parallel-backend",
        "decode-context-parallel-size",
    ),
    *_ignored("one engine on one device is served now", "enable-expert-parallel", "headless", kind="bool"),
    *_ignored(
        "not needed here",
        "swap-space",
        "cpu-offload-gb",
        "kv-transfer-config",
        "structured-outputs-config",
        "profiler-config",
        "override-generation-config",
        "logits-processors",
        "max-log-len",
        "log-config-file",
        "otlp-traces-endpoint",
        "max-parallel-loading-workers",
        "disable-access-log-for-endpoints",
        "middleware",
        "max-seq-len-to-capture",
        "prefix-caching-hash-algo",
        "ssl-cert-reqs",
        "additional-config",
        "long-prefill-token-threshold",
        "max-num-partial-prefills",
        "max-long-partial-prefills",
        "hf-overrides",
        "guided-decoding-backend",
    ),
    *_ignored(
        "not needed here",
        "enable-sleep-mode",
        "enable-tokenizer-info-endpoint",
        "enable-log-requests",
        "disable-log-requests",
        "enable-log-outputs",
        "enable-log-deltas",
        "disable-log-stats",
        "enable-per-request-metrics",
        "return-tokens-as-token-ids",
        "exclude-tools-when-tool-choice-none",
        "disable-frontend-multiprocessing",
        "disable-hybrid-kv-cache-manager",
        "disable-cascade-attn",
        "use-v2-block-manager",
        "disable-custom-all-reduce",
        "skip-tokenizer-init",
        "enable-ssl-refresh",
        "enable-lora",
        kind="bool",
    ),
    *_ignored("hub tokens are read from HF_TOKEN only, so that they stay out of process lists", "hf-token"),
)

# Short options of vLLM, and single-dash forms with a dot (-cc.pass_config.x=true).
SHORT_FLAGS = {
    "-tp": "tensor-parallel-size",
    "-dp": "data-parallel-size",
    "-pp": "pipeline-parallel-size",
    "-asc": "api-server-count",
    "-cc": "compilation-config",
    "-sc": "speculative-config",
    "-O": "optimization-level",
    "-q": "quantization",
}

FLAGS: dict[str, Flag] = {
    flag.name: flag for flag in (*MODEL_FLAGS, *ENGINE_FLAGS, *SERVER_FLAGS, *TOOL_FLAGS, *KNOWN_FLAGS)
}
ALIASES: dict[str, str] = {alias: flag.name for flag in FLAGS.values() for alias in flag.aliases}

# Variables that vLLM's users set and that mean nothing here; named once each at start.
KNOWN_ENVIRONMENT = {
    "VLLM_USE_FLASHINFER_MOE_MXFP4_MXFP8": "Chorale picks its own kernels",
    "VLLM_USE_FLASHINFER_MOE_MXFP4_BF16": "Chorale picks its own kernels",
    "VLLM_MXFP4_USE_MARLIN": "Chorale picks its own kernels",
    "VLLM_USE_TRTLLM_ATTENTION": "Chorale picks its own kernels",
    "VLLM_USE_TRTLLM_DECODE_ATTENTION": "Chorale picks its own kernels",
    "VLLM_USE_TRTLLM_CONTEXT_ATTENTION": "Chorale picks its own kernels",
    "VLLM_ATTENTION_BACKEND": "Chorale picks its own kernels",
    "VLLM_ROCM_USE_AITER": "Chorale picks its own kernels",
    "VLLM_ENABLE_RESPONSES_API_STORE": "the response store is always on",
    "VLLM_USE_MODELSCOPE": "only the Hugging Face hub is served",
}
