"""The flags of ``chorale serve``: one table, vLLM's names.

Every entry sets a field of ``EngineConfig``, ``ServerConfig`` or ``ToolConfig`` (``target``) or is handled by
the command itself (``target`` starts with "cli."). Its kind, bounds, choices, synonyms and variables stand
here; the argument parser, the YAML reader, ``chorale config show``, the help and shell completion read them
from this table. ``vllm_flags.py`` lists vLLM's flags that have no effect here. Rules between flags are in
``configs.py``, those of ``--compilation-config`` in ``compilation.py``; both name the flags that they join.
"""

from __future__ import annotations

from chorale.cli.options.values import MOST, Flag
from chorale.cli.options.vllm_flags import DEVICES, KNOWN_FLAGS

MODEL_FLAGS = (
    Flag("model", "str", "engine.model", "folder, hub id or demo; also the positional argument"),
    Flag("revision", "str", "engine.revision", "branch, tag or commit on the hub"),
    Flag("download-dir", "str", "engine.download_dir", "where checkpoints are downloaded to"),
    Flag(
        "device",
        "str",
        "engine.device",
        "where to run",
        choices=("auto", "cpu", "cuda"),
        refused_values=DEVICES,
    ),
    Flag(
        "dtype",
        "str",
        "engine.dtype",
        "dense weights and activations: auto, bfloat16 or float32",
        synonyms={"float": "float32"},
    ),
    Flag("ops", "str", "engine.ops", "op back end", choices=("auto", "reference", "triton")),
    Flag(
        "seed", "int", "engine.seed", "what the seeds of requests that bring none are drawn from", least=-MOST
    ),
    Flag(
        "generation-config",
        "str",
        "engine.generation_config",
        "auto: sampling defaults of the checkpoint; none (or vllm): neutral ones",
        choices=("auto", "none", "vllm"),
        synonyms={"vllm": "none"},
    ),
    Flag(
        "override-generation-config",
        "json",
        "engine.override_generation_config",
        'sampling defaults that win over them, for example {"temperature": 0.7}',
    ),
    Flag("served-model-name", "list", "server.served_model_names", "names in the API; the first is echoed"),
    Flag("num-threads", "int", "engine.num_threads", "CPU threads of the reference ops", least=1, most=4096),
)

ENGINE_FLAGS = (
    Flag("max-model-len", "size", "engine.max_model_len", "longest prompt plus output, tokens", least=2),
    Flag("max-num-seqs", "size", "engine.max_num_seqs", "sequences running at once", least=1),
    Flag(
        "max-num-batched-tokens",
        "size",
        "engine.max_num_batched_tokens",
        "tokens computed in one step",
        least=1,
    ),
    Flag(
        "prompt-delay",
        "float",
        "engine.prompt_delay",
        "seconds that prompts may add to a step while other answers are streamed; 0: no bound",
        least=0,
    ),
    Flag("block-size", "int", "engine.block_size", "tokens in a page of the KV cache", least=1),
    Flag(
        "num-gpu-blocks-override",
        "int",
        "engine.num_gpu_blocks_override",
        "pages in the KV pool, exactly",
        least=1,
    ),
    Flag(
        "gpu-memory-utilization",
        "float",
        "engine.gpu_memory_utilization",
        "share of the device's memory",
        least=0,
        above=True,
        most=1,
    ),
    Flag("kv-cache-memory-bytes", "size", "engine.kv_cache_memory_bytes", "bytes of the KV pool", least=1),
    Flag(
        "kv-cache-dtype",
        "str",
        "engine.kv_cache_dtype",
        "keys and values: auto, bfloat16, float32 or fp8 (e4m3)",
    ),
    Flag(
        "moe-activation-dtype",
        "str",
        "engine.moe_activation_dtype",
        "inputs of the experts: auto, bfloat16, or fp8 (faster prefill and large batches, less exact)",
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
    Flag(
        "tensor-parallel-size",
        "int",
        "engine.tensor_parallel_size",
        "GPUs that share the model; more than 1 is not served yet (start one server a GPU)",
        aliases=("tp",),
        least=1,
    ),
    Flag("enforce-eager", "bool", "engine.enforce_eager", "no CUDA graphs"),
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
        "rows of the largest decode step that is captured; 0: no CUDA graphs",
        least=0,
    ),
    Flag(
        "cudagraph-capture-sizes",
        "list",
        "engine.cudagraph_capture_sizes",
        "rows of the decode steps that are captured",
        aliases=("cuda-graph-sizes",),
    ),
    Flag(
        "compilation-config",
        "json",
        "cli.compilation",
        "cudagraph_mode, cudagraph_capture_sizes, max_cudagraph_capture_size act; no other key is needed",
    ),
    Flag(
        "optimization-level",
        "int",
        "cli.optimization_level",
        "0: no CUDA graphs (unless cudagraph_mode or --no-enforce-eager asks for them); 1 to 3: no effect",
        least=0,
        most=3,
    ),
    Flag(
        "max-logprobs", "int", "engine.max_logprobs", "most log-probabilities a request may ask for", least=-1
    ),
    Flag("max-queued-requests", "size", "server.max_queued_requests", "waiting choices before 429", least=0),
)

SERVER_FLAGS = (
    Flag("host", "str", "server.host", "address to listen on"),
    Flag("port", "int", "server.port", "port to listen on", least=0, most=65535),
    Flag("uds", "str", "server.uds", "listen on a unix socket instead"),
    Flag("root-path", "str", "server.root_path", "path prefix of a proxy in front"),
    Flag(
        "api-server-count",
        "int",
        "server.api_server_count",
        "HTTP processes",
        aliases=("asc",),
        least=1,
        most=64,
    ),
    Flag(
        "api-key",
        "list",
        "cli.api_key",
        "keys that clients must send (better: CHORALE_API_KEY)",
        adds=True,
        environment=("CHORALE_API_KEY", "VLLM_API_KEY"),
    ),
    Flag("api-key-file", "str", "cli.api_key_file", "file with one key a line"),
    Flag(
        "stream-interval", "int", "server.stream_interval", "tokens per stream event after the first", least=1
    ),
    Flag(
        "shutdown-timeout",
        "float",
        "server.shutdown_timeout",
        "seconds for running requests on SIGTERM",
        least=0,
    ),
    Flag("ssl-keyfile", "str", "server.ssl_keyfile", "TLS private key"),
    Flag("ssl-certfile", "str", "server.ssl_certfile", "TLS certificate"),
    Flag("ssl-ca-certs", "str", "server.ssl_ca_certs", "CA bundle that clients' certificates are checked by"),
    Flag(
        "ssl-cert-reqs",
        "int",
        "server.ssl_cert_reqs",
        "certificates of clients: 0 none, 1 checked if sent, 2 demanded",
        least=0,
        most=2,
    ),
    Flag("allowed-origins", "json", "server.allowed_origins", "CORS origins, as JSON (off by default)"),
    Flag("allowed-methods", "json", "server.allowed_methods", "CORS methods, as JSON"),
    Flag("allowed-headers", "json", "server.allowed_headers", "CORS headers, as JSON"),
    Flag("allow-credentials", "bool", "server.allow_credentials", "CORS credentials"),
    Flag("enable-request-id-headers", "bool", "server.enable_request_id_headers", "echo X-Request-Id"),
    Flag("disable-fastapi-docs", "bool", "server.disable_docs", "no /docs and /openapi.json"),
    Flag(
        "disable-log-stats",
        "bool",
        "server.disable_log_stats",
        "no line of throughput while there is work, and no vllm: metrics",
    ),
    Flag(
        "log-stats-interval",
        "float",
        "server.log_stats_interval",
        "seconds between those lines",
        least=0.1,
        environment=("VLLM_LOG_STATS_INTERVAL",),
    ),
    Flag(
        "enable-tokenizer-info-endpoint",
        "bool",
        "server.tokenizer_info",
        "serve /tokenizer_info: the tokenizer's class, special tokens and chat template",
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
    Flag("disable-uvicorn-access-log", "bool", "cli.disable_access_log", "no access log"),
    Flag(
        "h11-max-incomplete-event-size", "size", "server.max_header_bytes", "most bytes of headers", least=1
    ),
    Flag("h11-max-header-count", "int", "server.max_headers", "most headers", least=1),
    Flag("max-body-bytes", "size", "server.max_body_bytes", "largest request body", least=1),
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
        least=1,
    ),
    Flag(
        "response-store-max-bytes", "size", "server.response_store_max_bytes", "most bytes of them", least=1
    ),
    Flag(
        "response-store-ttl",
        "float",
        "server.response_store_ttl",
        "seconds that an unused one is kept",
        least=1,
    ),
    Flag(
        "responses-dialect",
        "str",
        "server.responses_dialect",
        "form of Responses: OpenAI's, that of openresponses.org, or OpenAI's with reasoning as the summary",
        choices=("openai", "open-responses", "summary"),
    ),
    Flag(
        "max-background-responses",
        "int",
        "server.max_background_responses",
        "background responses that may run at once",
        least=0,
    ),
    Flag(
        "default-chat-template-kwargs",
        "json",
        "cli.template_defaults",
        'what requests may leave out: {"reasoning_effort": "high"} and no other key',
    ),
    Flag(
        "system-start-date",
        "str",
        "server.system_start_date",
        "pins the prompt's current date",
        environment=("CHORALE_SYSTEM_START_DATE", "VLLM_SYSTEM_START_DATE"),
    ),
    Flag(
        "reasoning-field",
        "str",
        "server.reasoning_field",
        "name of the reasoning text in Chat; clients that show it twice need one of them",
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
    Flag(
        "browser-tool-timeout",
        "float",
        "tools.fetch_timeout",
        "seconds of a page or a search",
        least=0,
        above=True,
        most=3600,
    ),
    Flag("browser-tool-bytes", "size", "tools.fetch_bytes", "largest page", least=1024),
    Flag(
        "python-tool",
        "str",
        "tools.python",
        "sandbox of the python tool",
        choices=("none", "auto", "gvisor", "docker", "podman", "bubblewrap", "wasm", "dangerously_use_uv"),
    ),
    Flag("python-tool-image", "str", "tools.python_image", "container image of the python tool"),
    Flag(
        "python-tool-timeout",
        "float",
        "tools.python_timeout",
        "seconds of a call",
        least=0,
        above=True,
        most=3600,
    ),
    Flag("python-tool-memory", "size", "tools.python_memory_bytes", "memory of a session", least=64 * 2**20),
    Flag("python-tool-processes", "int", "tools.python_processes", "processes of a session", least=1),
    Flag("python-tool-sessions", "int", "tools.python_sessions", "sessions at once", least=1),
    Flag("python-tool-network", "bool", "tools.python_network", "code may use the network"),
    Flag(
        "mcp-timeout",
        "float",
        "tools.call_timeout",
        "seconds of a call to an MCP server",
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
