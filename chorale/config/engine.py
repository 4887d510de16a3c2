"""EngineConfig and ServerConfig: the operator's choices, frozen, built once in ``cli/`` or ``LLM``.

``None`` means "decide for me": ``resolve`` is the only place where defaults are decided, each with its
reason. Names are vLLM's flag names. Secrets (API keys, hub token) are never held here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from chorale.config.adapters import LoraModule
from chorale.config.kv_events import KvEventsConfig
from chorale.config.profiler import ProfilerConfig
from chorale.config.speculative import SpeculativeConfig, check_ranks_of_head
from chorale.config.weight_transfer import WeightTransferConfig
from chorale.errors import ConfigError

DEMO = "demo"


Dtype = Literal["auto", "float32", "bfloat16"]
LogprobsMode = Literal["raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"]
MOST_ENGINES = 64  # replicas of a server or of ``LLM``
# gpt-oss has three efforts; other names of OpenAI's enum map to the nearest.
EFFORTS: dict[str, Literal["low", "medium", "high"]] = {
    "none": "low",
    "minimal": "low",
    "low": "low",
    "medium": "medium",
    "high": "high",
    "xhigh": "high",
    "max": "high",
}
DisabledEffort = Literal["auto", "none", "low", "medium", "high", "xhigh", "max"]
DraftMetrics = Literal["none", "summary", "detailed"]
FingerprintMode = Literal["full", "hash", "custom", "none"]
# vLLM's names of the buckets that several histograms share; those of the engine's histograms are fixed
BUCKET_FAMILIES = (
    "request_latency", "time_to_first_token", "inter_token_latency", "request_params_n",
    "request_num_preemptions", "request_tokens",
)  # fmt: skip
# function: calls name declared functions; parameter: and their arguments satisfy the schemas
StrictLevel = Literal["auto", "function", "parameter"]
BrowserOption = Literal["none", "auto", "searxng", "exa", "you", "brave", "tavily", "offline"]
PythonOption = Literal[
    "none", "auto", "gvisor", "docker", "podman", "bubblewrap", "wasm", "dangerously_use_uv"
]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Everything the engine process needs. Sizes are tokens unless the name says otherwise."""

    model: str = "demo"  # a folder, a hub id, or "demo"
    revision: str | None = None
    download_dir: str | None = None
    device: Literal["auto", "cpu", "cuda", "rocm", "npu"] = "auto"
    dtype: Dtype = "auto"  # auto: bfloat16 on a GPU, float32 for small checkpoints on a CPU
    ops: Literal["auto", "reference", "cpu", "triton"] = "auto"
    cpu_precision: Literal["auto", "int8", "exact"] = "auto"  # matrix products of the CPU ops
    batch_invariant: bool = False  # equal bits whatever else is in the batch, and on any number of ranks
    seed: int = 0
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_active_seqs: int | None = None  # sequences that run at once; None: max_num_seqs
    max_num_batched_tokens: int | None = None
    max_num_scheduled_tokens: int | None = None  # tokens that a step computes; None: max_num_batched_tokens
    prefill_schedule_interval: int = 1  # steps from one step with prompts to the next, while streams run
    long_prefill_token_threshold: int = 0  # prompt tokens of a request per step beside others; 0: no limit
    long_prefill_token_threshold_adaptive: bool = False  # at least an equal share of a step's tokens
    watermark: float | None = None  # share of the pool that admissions leave free; None: decide for me
    prompt_delay: float | None = None  # max seconds that prompts add to a step with streams; 0: any
    block_size: int | None = None
    num_gpu_blocks_override: int | None = None  # exact number of blocks in the pool
    gpu_memory_utilization: float = 0.92
    kv_cache_memory_bytes: int | None = None
    kv_offloading_size: float | None = (
        None  # GiB of host memory for KV pages, all ranks together; None or 0: off
    )
    cpu_offload_params: tuple[str, ...] | None = None  # weights in host memory; None: decide for me
    kv_cache_dtype: Literal["auto", "bfloat16", "float32", "fp8", "fp8_e4m3"] = "auto"
    moe_activation_dtype: Literal["auto", "bfloat16", "fp8"] = "auto"  # fp8: e4m3, for large batches
    enable_prefix_caching: bool = True
    scheduling_policy: Literal["fcfs", "priority"] = "fcfs"
    async_scheduling: bool | None = None  # None: if the device supports it
    tensor_parallel_size: int = 1  # ranks: processes, each with its share of the model and its own device
    device_ids: tuple[int | str, ...] = ()  # GPUs: their UUIDs, or numbers among the visible ones; (): all
    distributed_timeout_seconds: int | None = None  # longest exchange between ranks; None: ten minutes
    enable_expert_parallel: bool | None = None  # a rank has whole experts, not slices of each; None: auto
    disable_custom_all_reduce: bool = False  # ranks communicate through NCCL (RCCL, HCCL) only
    enforce_eager: bool = False  # no CUDA graphs
    max_cudagraph_capture_size: int | None = None  # rows; None: max_num_seqs; 0: no graphs
    cudagraph_capture_sizes: tuple[int, ...] | None = None  # rows of the graphs; None: decide for me
    precompile_kernels: bool = True  # at start; False: each kernel at its first launch, as in Triton
    mixed_cuda_graphs: bool = True  # captures small mixed steps if decode steps are captured
    speculative_config: SpeculativeConfig | None = None  # None: one token per row and step
    kv_events_config: KvEventsConfig | None = None  # publishes changes of the prefix index
    enable_lora: bool = False  # requests may choose a LoRA adapter
    lora_modules: tuple[LoraModule, ...] = ()  # adapters to load at start
    max_loras: int = 1  # adapters on the device, which may run at once
    max_lora_rank: int = 16
    max_cpu_loras: int | None = None  # adapters kept in host memory; None: as many as max_loras
    enable_sleep_mode: bool = False  # the engine can release its memory and restore it
    profiler_config: ProfilerConfig | None = None  # traces on request; None: no profiler
    weight_transfer_config: WeightTransferConfig | None = None  # new weights on request; None: never
    max_logprobs: int = 20
    logprobs_mode: LogprobsMode = "raw_logprobs"  # processed: after masks, penalties, temperature, filters
    enable_return_routed_experts: bool = False  # answers contain the experts that the router chose
    generation_config: Literal["auto", "none"] = "auto"
    override_generation_config: dict[str, float] | None = None  # overrides the checkpoint's file
    num_threads: int | None = None  # CPU threads for computation
    kv_cache_metrics: bool = False  # how long blocks of the KV cache live, and lie idle
    kv_cache_metrics_sample: float = 0.01  # share of the blocks that are observed
    heartbeat_timeout: float = 5.0  # seconds of silence after which a process counts as hung
    host_share: int = 1  # CPU engines among which this host's cores and memory are shared


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolConfig:
    """The built-in tools that the operator enabled. Keys of search services stay in the environment."""

    servers: tuple[str, ...] = ()  # "demo", or MCP servers: host:port, http(s)://...
    mcp_config: str | None = None  # file in the common {"mcpServers": {label: {...}}} form
    mcp_requests: bool = True  # a request may name an MCP server by its address
    allow_private_hosts: bool = False  # requests and pages may use private addresses
    browser: BrowserOption | None = None  # None: auto if ``servers`` contains "demo", else none
    search_url: str | None = None  # address of the search service (SearXNG has no default)
    offline_pages: str | None = None  # folder of the offline back end; None: the bundled sample
    python: PythonOption | None = None  # None: the same as for ``browser``
    python_image: str = "python:3.11"
    python_timeout: float = 120.0  # seconds per call
    python_memory_bytes: int = 2**30
    python_processes: int = 64
    python_sessions: int = 16
    python_network: bool = False
    call_timeout: float = 60.0  # seconds per call to an MCP server
    fetch_timeout: float = 10.0  # seconds per page or search
    fetch_bytes: int = 5 * 2**20  # per page, decompressed


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Everything the HTTP process needs besides the engine's own info."""

    host: str = "127.0.0.1"
    port: int = 8000
    uds: str | None = None
    root_path: str = ""
    served_model_names: tuple[str, ...] = ()  # empty: the model argument itself
    enable_lora: bool = False
    lora_modules: tuple[LoraModule, ...] = ()  # as in the engine's
    lora_updates: bool = False  # adapters may be loaded and unloaded while serving
    lora_dirs: tuple[str, ...] = ()  # folders from which adapters may be loaded then
    api_server_count: int = 1
    data_parallel_size: int = 1  # engines behind this server (replicas), each with its own devices
    data_parallel_backend: Literal["mp", "ray"] = "mp"  # ray: replicas on the machines of a Ray cluster
    ray_assign_timeout: float = 60.0  # seconds that a request waits for a replica
    ray_max_moves: int = 3  # lost replicas after which a request fails, since it may be crashing them
    stream_interval: int = 1  # tokens per SSE event after the first
    max_queued_requests: int | None = None  # choices waiting beyond max_num_seqs; None: 4 x max_num_seqs
    max_num_queued_reqs: int | None = None  # choices running or waiting; beyond it 503
    max_num_queued_tokens: int | None = None  # prompt tokens not computed yet; from it on 503
    shutdown_timeout: float = 120.0  # seconds that running requests get after SIGTERM
    ssl_keyfile: str | None = None
    ssl_certfile: str | None = None
    ssl_ca_certs: str | None = None
    ssl_cert_reqs: int = 0  # client certificates, as ssl.CERT_*: 0 none, 1 checked if sent, 2 required
    ssl_keyfile_password_env: str | None = None
    ssl_ciphers: str | None = None  # OpenSSL's list, up to TLS 1.2; None: uvicorn's
    enable_ssl_refresh: bool = False  # load changed certificate files without a restart
    sse_keep_alive_interval: float = 15.0  # most seconds without a byte of a stream; 0: any
    log_error_stack: bool = False  # the stack trace of each error that a request gets
    unknown_fields: Literal["warn", "refuse"] = "warn"  # listed in the answer's header, or an error
    force_usage: bool = False  # every chunk of a stream contains the usage
    request_metrics: bool = False  # answers contain the request's timings
    spec_decode_metrics: DraftMetrics = "none"  # answers contain the acceptance of their drafts
    fingerprint_mode: FingerprintMode = "full"  # of ``system_fingerprint``
    fingerprint_value: str | None = None  # for the mode custom
    tokens_as_ids: bool = False  # log-probabilities name tokens as token_id:ID
    allowed_origins: tuple[str, ...] = ()  # CORS is off while empty
    allowed_methods: tuple[str, ...] = ("GET", "POST", "DELETE", "OPTIONS")
    allowed_headers: tuple[str, ...] = ("*",)
    allow_credentials: bool = False
    enable_request_id_headers: bool = True
    disable_docs: bool = False
    admin_endpoints: Literal["auto", "on", "off"] = (
        "auto"  # auto: off for others than this machine without keys
    )
    disable_log_stats: bool = False  # no throughput lines, and no vllm: series on /metrics
    histogram_buckets: dict[str, list[float]] = field(default_factory=dict)  # bounds by ``BUCKET_FAMILIES``
    log_stats_interval: float = 10.0  # seconds between throughput lines
    tokenizer_info: bool = False  # serve /tokenizer_info
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["text", "json"] = "text"  # json: an object per line, from every process
    otlp_traces_endpoint: str | None = None  # OpenTelemetry collector; None: from the environment
    access_log: bool = True
    key_weights: dict[str, float] = field(default_factory=dict)  # name of an API key's owner -> its weight
    max_body_bytes: int = 16 * 2**20
    max_header_bytes: int = 64 * 1024
    max_headers: int = 128
    header_timeout: float = 10.0
    body_timeout: float = 30.0
    min_upload_rate: int = 4000  # minimum bytes/s of a request body, averaged over 30 s; 0: none
    max_json_depth: int = 64
    # SQLite file, ":memory:", postgresql://..., or None for the default path
    response_store: str | None = None
    response_store_max_items: int = 100_000
    response_store_max_bytes: int = 10 * 2**30
    response_store_ttl: float = 30 * 86400.0  # seconds
    # Files and batches: a folder, s3://bucket/prefix, "none", or None for a folder next to the SQLite file
    batch_storage: str | None = None
    batch_max_file_bytes: int = 200 * 2**20
    batch_max_lines: int = 50_000
    batch_max_files: int = 1_000  # per API key
    batch_max_bytes: int = 10 * 2**30  # all files of an API key
    batch_max_total_bytes: int = 100 * 2**30  # all files of all keys
    batch_max_active: int = 16  # unfinished batches per API key
    batch_max_concurrency: int | None = None  # concurrent lines per server; None: max_num_seqs
    batch_ttl: float = 30 * 86400.0  # seconds for which batch files and ended batches are kept
    responses_dialect: Literal["openai", "open-responses", "summary"] = "openai"  # form of reasoning
    max_background_responses: int = 256  # concurrent, over all HTTP processes
    default_reasoning_effort: Literal["low", "medium", "high"] = "medium"  # for requests without one
    reasoning_effort_map: dict[str, str] = field(default_factory=dict)  # requested effort -> the one used
    disabled_thinking_effort: DisabledEffort = "auto"  # of Messages with thinking disabled; auto: low
    tool_strict_level: StrictLevel = "auto"  # what of each call a grammar enforces
    system_instructions: bool = False  # instructions follow the identity, in the system message
    system_start_date: str | None = None  # pins "Current date" (YYYY-MM-DD)
    reasoning_field: Literal["both", "reasoning", "reasoning_content"] = "both"
    tools: ToolConfig = ToolConfig()


def check_least(given: object, least: Mapping[str, int]) -> None:
    """Raises ``ConfigError`` for the first attribute below its minimum; None means that it is not set."""
    for name, minimum in least.items():
        value = getattr(given, name)
        if value is not None and value < minimum:
            raise ConfigError(f"--{name.replace('_', '-')} must be at least {minimum}")


VALID_SIZES = (1, 2, 4, 8)


OFFLOADED = ("embedding", "embed_tokens", "none")  # the second is its name in the published checkpoints


def check_size(size: int) -> None:
    """Raises ``ConfigError`` for a number of ranks that no model supports."""
    if size not in VALID_SIZES:
        raise ConfigError(f"--tensor-parallel-size {size}: must be one of {', '.join(map(str, VALID_SIZES))}")


def hash_key(key: str) -> bytes:
    """Returns the SHA-256 digest of a key, the only form in which keys are kept."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def check_ranks(config: EngineConfig) -> None:
    """Raises ``ConfigError`` for numbers of ranks that no model supports, before anything is downloaded."""
    check_size(config.tensor_parallel_size)
    if config.speculative_config is not None:
        check_ranks_of_head(config.speculative_config, config.tensor_parallel_size)


def check_sizes(config: EngineConfig) -> None:
    """Raises ``ConfigError`` for values that are invalid for any model and machine. The bounds of numbers are
    those of the flags."""
    if config.lora_modules and not config.enable_lora:
        raise ConfigError("--lora-modules needs --enable-lora")
    if config.enable_lora and config.moe_activation_dtype == "fp8":
        raise ConfigError("--enable-lora: adapters need --moe-activation-dtype bfloat16")
    if config.enable_lora and (config.max_cpu_loras or config.max_loras) < config.max_loras:
        raise ConfigError("--max-cpu-loras must be at least --max-loras")
    if config.enable_sleep_mode and config.kv_offloading_size:
        raise ConfigError(
            "--enable-sleep-mode and --kv-offloading-size: choose one; a sleep drops the KV pages"
        )
    if config.batch_invariant and config.enable_expert_parallel and config.tensor_parallel_size > 1:
        raise ConfigError("--batch-invariant needs columns of all experts, not --enable-expert-parallel")
    ids = [str(each) for each in config.device_ids]
    if len(set(ids)) < len(ids) or len({each.isdigit() for each in ids}) > 1:
        raise ConfigError(f"--device-ids {','.join(ids)}: must be different numbers, or different UUIDs")
    for name in config.cpu_offload_params or ():
        if name not in OFFLOADED:
            raise ConfigError(
                f"--cpu-offload-params {name}: must be embedding or none, as no other weights can stay in "
                "host memory"
            )


def owner_name(digest: bytes) -> str:
    """Returns the name by which the engine knows the owner with this key digest."""
    return digest.hex()[:16]
