"""The names, descriptions, labels and buckets of all metrics. Names with the prefix vllm: are vLLM's."""

from __future__ import annotations

Bounds = tuple[float, ...]
Labels = tuple[str, ...]
ENGINE_LABELS = ("model_name", "engine")


def _bounds(text: str) -> Bounds:
    return tuple(map(float, text.split()))


_LATENCY = _bounds("0.3 0.5 0.8 1 1.5 2 2.5 5 10 15 20 30 40 50 60 120 240 480 960 1920 7680")
_PER_TOKEN = _bounds("0.01 0.025 0.05 0.075 0.1 0.15 0.2 0.3 0.4 0.5 0.75 1 2.5 5 7.5 10 20 40 80")
_FIRST = _bounds(
    "0.001 0.005 0.01 0.02 0.04 0.06 0.08 0.1 0.25 0.5 0.75 1 2.5 5 7.5 10 20 40 80 160 640 2560"
)
_LENGTHS = _bounds("1 2 5 10 20 50 100 200 500 1e3 2e3 5e3 1e4 2e4 5e4 1e5 2e5")
_HTTP = _bounds("0.005 0.01 0.025 0.05 0.1 0.25 0.5 1 2.5 5 10 30 60 120 300")
# The buckets of prometheus-fastapi-instrumentator, which vLLM uses.
_HTTP_FINE = _bounds("0.01 0.025 0.05 0.075 0.1 0.25 0.5 0.75 1 1.5 2 2.5 3 3.5 4 4.5 5 7.5 10 30 60")

_FEW, _PREEMPTIONS = _bounds("1 2 5 10 20"), _bounds("1 2 3 4 5 10 20")
# The default buckets of ``BUCKET_FAMILIES``.
FAMILIES = {
    "request_latency": _LATENCY, "time_to_first_token": _FIRST, "inter_token_latency": _PER_TOKEN,
    "request_params_n": _FEW, "request_num_preemptions": _PREEMPTIONS, "request_tokens": _LENGTHS,
}  # fmt: skip

# fmt: off
HISTOGRAMS: dict[str, tuple[str, Bounds, Labels]] = {
    "vllm:time_to_first_token_seconds": ("Seconds from arrival to the first token", _FIRST, ()),
    "vllm:inter_token_latency_seconds": ("Seconds between consecutive tokens of a choice", _PER_TOKEN, ()),
    "vllm:request_time_per_output_token_seconds":
        ("Mean seconds per output token after the first", _PER_TOKEN, ()),
    "vllm:e2e_request_latency_seconds": ("Seconds from arrival to the end of the request", _LATENCY, ()),
    "vllm:request_queue_time_seconds": ("Seconds from arrival to the first engine step", _LATENCY, ()),
    "vllm:request_prefill_time_seconds":
        ("Seconds from the first engine step to the first token", _LATENCY, ()),
    "vllm:request_decode_time_seconds": ("Seconds from the first to the last token", _LATENCY, ()),
    "vllm:request_inference_time_seconds":
        ("Seconds from the first engine step to the last token", _LATENCY, ()),
    "vllm:request_prompt_tokens": ("Prompt tokens of a request", _LENGTHS, ()),
    "vllm:request_prefill_kv_computed_tokens":
        ("Prompt tokens of a request that were computed, without cached ones", _LENGTHS, ()),
    "vllm:request_generation_tokens": ("Output tokens of a choice", _LENGTHS, ()),
    "vllm:request_max_num_generation_tokens": ("Output tokens of a request's longest choice", _LENGTHS, ()),
    "vllm:request_params_n": ("Requested number of choices", _FEW, ()),
    "vllm:request_params_max_tokens": ("Requested max_tokens", _LENGTHS, ()),
    "vllm:request_num_preemptions": ("How often a choice was preempted", _PREEMPTIONS, ()),
    "http_request_duration_seconds":
        ("Seconds until the last byte of the response was sent", _HTTP, ("handler", "method")),
    "http_request_duration_highr_seconds":
        ("Seconds until the last byte of the response was sent, for all requests, in finer buckets",
         _HTTP_FINE, ()),
}
# fmt: on

COUNTERS: dict[str, tuple[str, Labels]] = {
    "vllm:prompt_tokens_cached": ("Prompt tokens served from the prefix cache", ()),
    "vllm:request_success": ("Choices that finished", ("finished_reason",)),
    "chorale:queue_rejections": ("Requests refused because the queue was full", ()),
    "vllm:admission_rejections": ("Requests that a limit of the queue refused, by the limit", ("reason",)),
    "chorale:aborts": ("Choices that were aborted", ("reason",)),
    "chorale:tool_calls": ("Calls of built-in tools", ("tool", "status")),
    "chorale:harmony_repairs": ("Malformed harmony output that was repaired", ("kind",)),
    "chorale:response_store_failures": ("Responses that could not be stored", ()),
    "chorale:batch_lines": ("Lines of batches that were answered", ("status",)),
    "http_requests": ("HTTP requests", ("handler", "method", "status")),
}

STORE_GAUGES: dict[str, tuple[str, Labels]] = {
    "chorale:response_store_up": (
        "1 if the last write to the response store succeeded, 0 if responses cannot be stored",
        (),
    ),
    "chorale:response_store_responses": ("Stored responses", ()),
    "chorale:response_store_conversations": ("Stored conversations", ()),
    "chorale:response_store_bytes": ("Bytes in the response store", ()),
    "chorale:background_responses": ("Running background responses of all servers with this store", ()),
    "chorale:files": ("Files of /v1/files", ()),
    "chorale:file_bytes": ("Bytes of the files of /v1/files", ()),
    "chorale:batches": ("Batches that have not ended", ("status",)),
}

# The limits that refuse requests: Chorale's own (429), and vLLM's (503), which are the codes of the errors.
REJECTIONS = ("max_queued_requests", "max_num_queued_reqs", "max_num_queued_tokens")

# Metrics of the server, not of an engine. Each has one series, labelled as engine 0.
BY_SERVER = (
    "chorale:queue_rejections", "vllm:admission_rejections", "chorale:tool_calls", "chorale:harmony_repairs",
    "chorale:response_store_failures", "chorale:batch_lines",
)  # fmt: skip

ACCEPTED_PER_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos"
SLEEP_STATES = ("awake", "weights_offloaded", "discard_all")  # vLLM's states


def is_http(name: str) -> bool:
    """Returns whether a metric is about HTTP and therefore has no engine labels."""
    return name.startswith("http_")
