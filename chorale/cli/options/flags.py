"""The table of ``chorale serve``'s flags, under vLLM's names.

Every entry sets a field of ``EngineConfig``, ``ServerConfig`` or ``ToolConfig`` (``target``), or is handled
by the command itself (``target`` starts with "cli."). The table holds its kind, bounds, choices, synonyms and
variables; the argument parser, the YAML reader, ``chorale config show``, the help and shell completion use
it. ``vllm_flags.py`` lists vLLM's flags that have no effect here. ``configs.py`` has the rules between flags
and ``compilation.py`` those of ``--compilation-config``.
"""

from __future__ import annotations

from chorale.cli.options.values import MOST, Flag
from chorale.cli.options.vllm_flags import DEVICES, KNOWN_FLAGS

MODEL_FLAGS = (
    Flag("model", "str", "engine.model", "model folder, hub id or demo; also the positional argument"),
    Flag("revision", "str", "engine.revision", "branch, tag or commit of the model on the hub"),
    Flag("download-dir", "str", "engine.download_dir", "folder for downloaded checkpoints"),
    Flag(
        "device",
        "str",
        "engine.device",
        "device to run on",
        choices=("auto", "cpu", "cuda"),
        refused_values=DEVICES,
    ),
    Flag(
        "dtype",
        "str",
        "engine.dtype",
        "type of dense weights and activations: auto, bfloat16 or float32",
        synonyms={"float": "float32"},
    ),
    Flag(
        "ops",
        "str",
        "engine.ops",
        "back end of the model's operations",
        choices=("auto", "reference", "triton"),
    ),
    Flag(
        "seed",
        "int",
        "engine.seed",
        "seed of requests without a seed of their own, which draw theirs from it",
        least=-MOST,
    ),
    Flag(
        "generation-config",
        "str",
        "engine.generation_config",
        "sampling defaults: auto for the checkpoint's, none (or vllm) for neutral ones",
        choices=("auto", "none", "vllm"),
        synonyms={"vllm": "none"},
    ),
    Flag(
        "override-generation-config",
        "json",
        "engine.override_generation_config",
        'sampling defaults that override them, for example {"temperature": 0.7}',
    ),
    Flag(
        "served-model-name",
        "list",
        "server.served_model_names",
        "model names in the API; responses carry the first",
    ),
    Flag("num-threads", "int", "engine.num_threads", "CPU threads of the reference ops", least=1, most=4096),
)

ENGINE_FLAGS = (
    Flag(
        "max-model-len",
        "size",
        "engine.max_model_len",
        "maximum length of prompt plus output, tokens",
        least=2,
    ),
    Flag("max-num-seqs", "size", "engine.max_num_seqs", "maximum number of running sequences", least=1),
    Flag(
        "max-num-batched-tokens",
        "size",
        "engine.max_num_batched_tokens",
        "maximum number of tokens per step",
        least=1,
    ),
    Flag(
        "prompt-delay",
        "float",
        "engine.prompt_delay",
        "seconds by which prompts may delay tokens of running streams per step; 0: no limit",
        least=0,
    ),
    Flag("block-size", "int", "engine.block_size", "tokens per page of the KV cache", least=1),
    Flag(
        "num-gpu-blocks-override",
        "int",
        "engine.num_gpu_blocks_override",
        "exact number of pages in the KV pool",
        least=1,
    ),
    Flag(
        "gpu-memory-utilization",
        "float",
        "engine.gpu_memory_utilization",
        "share of the device's memory to use",
        least=0,
        above=True,
        most=1,
    ),
    Flag(
        "kv-cache-memory-bytes",
        "size",
        "engine.kv_cache_memory_bytes",
        "size of the KV pool in bytes",
        least=1,
    ),
    Flag(
        "kv-cache-dtype",
        "str",
        "engine.kv_cache_dtype",
        "type of keys and values: auto, bfloat16, float32 or fp8 (e4m3)",
    ),
    Flag(
        "moe-activation-dtype",
        "str",
        "engine.moe_activation_dtype",
        "type of the experts' inputs: auto, bfloat16, or fp8 (faster prefill and large batches, less exact)",
    ),
    Flag(
        "enable-prefix-caching",
        "bool",
        "engine.enable_prefix_caching",
        "reuse the KV cache of common prefixes",
    ),
    Flag(
        "scheduling-policy",
        "str",
        "engine.scheduling_policy",
        "order of waiting requests",
        choices=("fcfs", "priority"),
    ),
    Flag("async-scheduling", "bool", "engine.async_scheduling", "plan the next step while one runs"),
    Flag(
        "tensor-parallel-size",
        "int",
        "engine.tensor_parallel_size",
        "number of GPUs; only 1 is supported so far (start one server per GPU)",
        aliases=("tp",),
        least=1,
    ),
    Flag("enforce-eager", "bool", "engine.enforce_eager", "disable CUDA graphs"),
    Flag(
        "precompile-kernels",
        "bool",
        "engine.precompile_kernels",
        "compile GPU kernels at start-up, in processes; if off, each compiles at its first launch",
        environment=("CHORALE_PRECOMPILE_KERNELS",),
    ),
    Flag(
        "max-cudagraph-capture-size",
        "size",
        "engine.max_cudagraph_capture_size",
        "largest captured decode batch, in rows; 0: no CUDA graphs",
        least=0,
    ),
    Flag(
        "cudagraph-capture-sizes",
        "list",
        "engine.cudagraph_capture_sizes",
        "captured decode batch sizes, in rows",
        aliases=("cuda-graph-sizes",),
    ),
    Flag(
        "compilation-config",
        "json",
        "cli.compilation",
        "only cudagraph_mode, cudagraph_capture_sizes and max_cudagraph_capture_size have an effect",
    ),
    Flag(
        "optimization-level",
        "int",
        "cli.optimization_level",
        "0: no CUDA graphs (unless cudagraph_mode or --no-enforce-eager enables them); 1 to 3: no effect",
        least=0,
        most=3,
    ),
    Flag(
        "max-logprobs",
        "int",
        "engine.max_logprobs",
        "maximum number of log-probabilities per token",
        least=-1,
    ),
    Flag(
        "max-queued-requests",
        "size",
        "server.max_queued_requests",
        "maximum number of queued choices; more are refused with 429",
        least=0,
    ),
)

SERVER_FLAGS = (
    Flag("host", "str", "server.host", "address to listen on"),
    Flag("port", "int", "server.port", "port to listen on", least=0, most=65535),
    Flag("uds", "str", "server.uds", "listen on a unix socket instead"),
    Flag("root-path", "str", "server.root_path", "path prefix added by a reverse proxy"),
    Flag(
        "api-server-count",
        "int",
        "server.api_server_count",
        "number of HTTP processes",
        aliases=("asc",),
        least=1,
        most=64,
    ),
    Flag(
        "api-key",
        "list",
        "cli.api_key",
        "API keys, one of which clients must send (prefer CHORALE_API_KEY)",
        adds=True,
        environment=("CHORALE_API_KEY", "VLLM_API_KEY"),
    ),
    Flag("api-key-file", "str", "cli.api_key_file", "file with one API key per line"),
    Flag(
        "stream-interval", "int", "server.stream_interval", "tokens per stream event after the first", least=1
    ),
    Flag(
        "shutdown-timeout",
        "float",
        "server.shutdown_timeout",
        "seconds that running requests may take after SIGTERM",
        least=0,
    ),
    Flag("ssl-keyfile", "str", "server.ssl_keyfile", "TLS private key"),
    Flag("ssl-certfile", "str", "server.ssl_certfile", "TLS certificate"),
    Flag("ssl-ca-certs", "str", "server.ssl_ca_certs", "CA bundle for client certificates"),
    Flag(
        "ssl-cert-reqs",
        "int",
        "server.ssl_cert_reqs",
        "client certificates: 0 not requested, 1 checked if sent, 2 required",
        least=0,
        most=2,
    ),
    Flag(
        "allowed-origins",
        "json",
        "server.allowed_origins",
        "allowed CORS origins, a JSON list (off by default)",
    ),
    Flag("allowed-methods", "json", "server.allowed_methods", "allowed CORS methods, a JSON list"),
    Flag("allowed-headers", "json", "server.allowed_headers", "allowed CORS headers, a JSON list"),
    Flag("allow-credentials", "bool", "server.allow_credentials", "allow CORS credentials"),
    Flag(
        "enable-request-id-headers",
        "bool",
        "server.enable_request_id_headers",
        "echo the X-Request-Id header",
    ),
    Flag("disable-fastapi-docs", "bool", "server.disable_docs", "disable /docs and /openapi.json"),
    Flag(
        "disable-log-stats",
        "bool",
        "server.disable_log_stats",
        "disable the periodic throughput log line and the vllm: metrics",
    ),
    Flag(
        "log-stats-interval",
        "float",
        "server.log_stats_interval",
        "seconds between throughput log lines",
        least=0.1,
        environment=("VLLM_LOG_STATS_INTERVAL",),
    ),
    Flag(
        "enable-tokenizer-info-endpoint",
        "bool",
        "server.tokenizer_info",
        "serve /tokenizer_info: tokenizer class, special tokens and chat template",
    ),
    Flag(
        "uvicorn-log-level",
        "str",
        "server.log_level",
        "log level",
        aliases=("log-level",),
        choices=("trace", "debug", "info", "warning", "error", "critical"),
        synonyms={"trace": "debug", "critical": "error"},
        environment=("VLLM_LOGGING_LEVEL",),
    ),
    Flag("disable-uvicorn-access-log", "bool", "cli.disable_access_log", "disable the access log"),
    Flag(
        "h11-max-incomplete-event-size",
        "size",
        "server.max_header_bytes",
        "maximum size of request headers",
        least=1,
    ),
    Flag("h11-max-header-count", "int", "server.max_headers", "maximum number of request headers", least=1),
    Flag("max-body-bytes", "size", "server.max_body_bytes", "maximum size of a request body", least=1),
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
        "maximum number of stored responses and conversations",
        least=1,
    ),
    Flag(
        "response-store-max-bytes",
        "size",
        "server.response_store_max_bytes",
        "maximum size of the store",
        least=1,
    ),
    Flag(
        "response-store-ttl",
        "float",
        "server.response_store_ttl",
        "seconds after which unused stored items are deleted",
        least=1,
    ),
    Flag(
        "responses-dialect",
        "str",
        "server.responses_dialect",
        "dialect of Responses: OpenAI's, openresponses.org's, or OpenAI's with reasoning in the summary",
        choices=("openai", "open-responses", "summary"),
    ),
    Flag(
        "max-background-responses",
        "int",
        "server.max_background_responses",
        "maximum number of running background responses",
        least=0,
    ),
    Flag(
        "default-chat-template-kwargs",
        "json",
        "cli.template_defaults",
        'default reasoning effort, as {"reasoning_effort": "high"}; no other key is allowed',
    ),
    Flag(
        "system-start-date",
        "str",
        "server.system_start_date",
        "fixed current date in the system prompt, YYYY-MM-DD (default: today)",
        environment=("CHORALE_SYSTEM_START_DATE", "VLLM_SYSTEM_START_DATE"),
    ),
    Flag(
        "reasoning-field",
        "str",
        "server.reasoning_field",
        "field name of reasoning in Chat Completions; choose one name for clients that show it twice",
        choices=("both", "reasoning", "reasoning_content"),
    ),
    Flag("config", "str", "cli.config", "YAML file with these options as keys"),
)

TOOL_FLAGS = (
    Flag(
        "tool-server",
        "list",
        "tools.servers",
        "built-in tools: demo (browser and python), or HOST:PORT[,HOST:PORT] of MCP servers",
    ),
    Flag("mcp-config", "str", "tools.mcp_config", 'JSON file of MCP servers ({"mcpServers": ...})'),
    Flag("mcp-requests", "bool", "tools.mcp_requests", "allow requests to name MCP servers by address"),
    Flag(
        "tool-allow-private-hosts",
        "bool",
        "tools.allow_private_hosts",
        "allow tools to connect to private addresses",
    ),
    Flag(
        "browser-tool",
        "str",
        "tools.browser",
        "search service of the browser tool; none turns the tool off",
        choices=("none", "auto", "searxng", "exa", "you", "brave", "tavily", "offline"),
    ),
    Flag("browser-tool-url", "str", "tools.search_url", "address of the search service"),
    Flag(
        "browser-tool-pages", "str", "tools.offline_pages", "folder of pages for the offline search service"
    ),
    Flag(
        "browser-tool-timeout",
        "float",
        "tools.fetch_timeout",
        "time limit of a page or search, seconds",
        least=0,
        above=True,
        most=3600,
    ),
    Flag("browser-tool-bytes", "size", "tools.fetch_bytes", "maximum size of a page", least=1024),
    Flag(
        "python-tool",
        "str",
        "tools.python",
        "sandbox of the python tool; none turns the tool off",
        choices=("none", "auto", "gvisor", "docker", "podman", "bubblewrap", "wasm", "dangerously_use_uv"),
    ),
    Flag("python-tool-image", "str", "tools.python_image", "container image of the python tool"),
    Flag(
        "python-tool-timeout",
        "float",
        "tools.python_timeout",
        "time limit of a python call, seconds",
        least=0,
        above=True,
        most=3600,
    ),
    Flag(
        "python-tool-memory",
        "size",
        "tools.python_memory_bytes",
        "memory limit of a python session",
        least=64 * 2**20,
    ),
    Flag(
        "python-tool-processes", "int", "tools.python_processes", "process limit of a python session", least=1
    ),
    Flag(
        "python-tool-sessions", "int", "tools.python_sessions", "maximum number of python sessions", least=1
    ),
    Flag("python-tool-network", "bool", "tools.python_network", "allow code to use the network"),
    Flag(
        "mcp-timeout",
        "float",
        "tools.call_timeout",
        "time limit of an MCP call, seconds",
        least=0,
        above=True,
        most=3600,
    ),
)

# Short options of vLLM, and single-dash forms with a dot (-cc.pass_config.x=true).
SHORT_FLAGS = {
    "-tp": "tensor-parallel-size",
    "-dp": "data-parallel-size",
    "-dpl": "data-parallel-size-local",
    "-dpn": "data-parallel-rank",
    "-dpr": "data-parallel-start-rank",
    "-dpa": "data-parallel-address",
    "-dpp": "data-parallel-rpc-port",
    "-dpb": "data-parallel-backend",
    "-dph": "data-parallel-hybrid-lb",
    "-dpe": "data-parallel-external-lb",
    "-pp": "pipeline-parallel-size",
    "-dcp": "decode-context-parallel-size",
    "-pcp": "prefill-context-parallel-size",
    "-ep": "enable-expert-parallel",
    "-n": "nnodes",
    "-r": "node-rank",
    "-asc": "api-server-count",
    "-ac": "attention-config",
    "-cc": "compilation-config",
    "-sc": "speculative-config",
    "-O": "optimization-level",
    "-q": "quantization",
}

FLAGS: dict[str, Flag] = {
    flag.name: flag for flag in (*MODEL_FLAGS, *ENGINE_FLAGS, *SERVER_FLAGS, *TOOL_FLAGS, *KNOWN_FLAGS)
}
ALIASES: dict[str, str] = {alias: flag.name for flag in FLAGS.values() for alias in flag.aliases}
