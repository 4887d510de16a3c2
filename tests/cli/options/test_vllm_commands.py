"""vLLM's command lines and files for gpt-oss: each option acts, gives a notice, or is refused."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from chorale.config.options.settings import merge
from chorale.errors import ConfigError

# (arguments of "vllm serve", number of notices)
ACCEPTED = [
    ("openai/gpt-oss-20b --max-model-len 32k --gpu-memory-utilization 0.95", 0),
    ("openai/gpt-oss-120b --tool-call-parser openai --reasoning-parser openai_gptoss "
     "--enable-auto-tool-choice --tensor-parallel-size 1", 3),
    ("openai/gpt-oss-120b --gpu-memory-utilization 0.75 --host 127.0.0.1 --max-num-seqs 32 "
     "--enable-chunked-prefill --port 8000 --max-model-len 8192", 1),
    ("--host 0.0.0.0 --port 8010 --model openai/gpt-oss-20b --served-model-name code-gen", 0),
    ("--host 0.0.0.0 --port 8000 --model openai/gpt-oss-120b --swap-space 16 --disable-log-requests", 2),
    ("openai/gpt-oss-20b --seed 42 --generation-config vllm --port 8020 --tensor-parallel-size 1 "
     "--hf-overrides '{\"rope-scaling\": {\"factor\": 4}}' --gpu-memory-utilization 0.5", 1),
    ("--model openai/gpt-oss-120b --api-server-count 4 --max-num-batched-tokens 131072 "
     "--calculate-kv-scales --enable-prefix-caching "
     "--speculative-config '{\"method\":\"ngram\",\"num_speculative_tokens\":4}'", 1),
    ("openai/gpt-oss-120b --attention-backend ROCM_AITER_UNIFIED_ATTN -cc.pass_config.fuse_rope_kvcache=True "
     "-cc.use_inductor_graph_partition=True --gpu-memory-utilization 0.95 --block-size=64", 2),
    ("openai/gpt-oss-120b --tensor_parallel_size 1 --max-num-batched-tokens 10240 --max-num-seqs 128", 0),
    ("openai/gpt-oss-20b --tool-server localhost:8001,localhost:8002", 0),
    ("openai/gpt-oss-20b --compilation_config.pass_config.fuse_allreduce_rms true", 1),
    ("openai/gpt-oss-20b -O 3 -O.cudagraph_mode FULL", 2),
    ("openai/gpt-oss-20b --enforce-eager --no-enable-chunked-prefill", 1),
    ("openai/gpt-oss-20b --cuda-graph-sizes 1 2 4 8", 0),
    ("openai/gpt-oss-20b --default-chat-template-kwargs '{\"reasoning_effort\": \"high\"}'", 0),
    ("openai/gpt-oss-120b --data-parallel-size 1 --enable-expert-parallel", 0),
    ("openai/gpt-oss-120b --data-parallel-size 4 --data-parallel-size-local 4", 0),
    ("openai/gpt-oss-120b -dp 1 -dpl 1 -dpa 10.0.0.1 -dpp 13345 -dpb ray -ep", 2),
    ("openai/gpt-oss-120b -pp 1 -dcp 1 -pcp 1 -dpn 0 -dpr 0 -n 1 -r 0 -dph -dpe", 2),
    ("openai/gpt-oss-120b -ac.backend FLASH_ATTN --kernel-config.moe_backend=marlin", 2),
    ("openai/gpt-oss-120b --eplb-config.window_size 3 --model-loader-extra-config '{\"concurrency\": 8}'", 2),
    ("openai/gpt-oss-120b --ignore-patterns a b --allowed-media-domains c d", 2),
    ("openai/gpt-oss-120b --distributed-executor-backend ray --disable-custom-all-reduce", 1),
    ("openai/gpt-oss-20b --trust-remote-code --dtype auto --load-format auto", 1),
    ("openai/gpt-oss-20b --quantization mxfp4 --dtype bfloat16", 1),
    ("openai/gpt-oss-20b --disable-log-stats --uvicorn-log-level critical --disable-uvicorn-access-log", 0),
    ("openai/gpt-oss-20b --no-enable-log-requests --disable-frontend-multiprocessing", 1),
    ("openai/gpt-oss-20b --chat-template /templates/mine.jinja", 1),
    ("openai/gpt-oss-20b --limit-mm-per-prompt '{\"image\": 0}' --max-logprobs 50", 1),
    ("openai/gpt-oss-20b --logprobs-mode processed_logprobs --ssl-cert-reqs 0 --nnodes 1 --node-rank 0", 0),
    ("openai/gpt-oss-20b --revision main --download-dir /models --allowed-origins '[\"*\"]'", 0),
]  # fmt: skip

REFUSED = [
    ("--lora-modules a=/x", "--enable-lora"),
    ("--enable-lora --lora-modules a", "NAME=PATH"),
    ("--enable-lora --max-loras 4 --max-cpu-loras 2", "--max-cpu-loras"),
    ("--tensor-parallel-size 3", "must be one of 1, 2, 4, 8"),
    ("--data-parallel-size 4 --data-parallel-size-local 2", "all 4 engines run on this machine"),
    ("-dpl 0", "run on this machine"),
    ("-dp 2 -dpl 1 -dpb ray", "Ray places the engines"),
    ("-dp 2 -dpb mpi", "not one of mp, ray"),
    ("-O 4", "between 0 and 3"),
    ("-cc.cudagraph_mode SOME", "FULL_AND_PIECEWISE"),
    ("-cc.cudagraph_capture_sizes 8", "list of integers"),
    ("-cc.mode 7", "from 0 to 3"),
    ("-cc FULL", "is not JSON"),
    ("-cc '[1]'", "JSON object"),
    ("--ec-transfer-config.ec_role ec_consumer", "disaggregated prefill"),
    ("--nnodes 2", "one machine"),
    ("--ssl-cert-reqs 2", "--ssl-ca-certs"),
    ("--ssl-cert-reqs 5", "0, 1 or 2"),
    ("--dtype float16", "bfloat16 or float32"),
    ("--kv-cache-dtype fp8_e5m2", "mantissa"),
    ("--override-generation-config '{\"temprature\": 1}'", "temprature"),
    ("--override-generation-config.top_p 1.5", "out of range"),
    ("--override-generation-config '[1]'", "JSON object"),
    ("--default-chat-template-kwargs '{\"enable_thinking\": false}'", "reasoning_effort"),
    ("--default-chat-template-kwargs.reasoning_effort extreme", "reasoning_effort"),
    ("--max-model-len.x 3", "does not accept .KEY"),
    ("--allowed-origins '*'", "is not JSON"),
    ("-cc.mode", "needs a value"),
]


@pytest.mark.parametrize(("line", "num_notices"), ACCEPTED)
def test_vllm_command_lines_are_accepted(line: str, num_notices: int) -> None:
    settings = merge(shlex.split(line), {})
    assert settings.engine.model.startswith("openai/gpt-oss-")
    assert len(settings.notices) == num_notices, settings.notices
    assert all(len(notice) < 180 and "accepted and" in notice for notice in settings.notices)


@pytest.mark.parametrize(("line", "words"), REFUSED)
def test_refused_flags_have_a_reason(line: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        merge(["openai/gpt-oss-20b", *shlex.split(line)], {})
    assert words in caught.value.message
    assert "\n" not in caught.value.message


def test_parts_of_a_json_value_are_merged() -> None:
    line = "--override-generation-config.temperature 0.5 --override-generation-config.top_k=40"
    settings = merge(shlex.split(line), {})
    assert settings.engine.override_generation_config == {"temperature": 0.5, "top_k": 40}
    assert (
        merge(["--default-chat-template-kwargs.reasoning_effort=high"], {}).server.default_reasoning_effort
        == "high"
    )


def test_a_file_can_set_the_same_options(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(
        "override-generation-config: {temperature: 0.5}\ndata-parallel-size: 2\ndata-parallel-backend: ray\n"
        "no-enable-log-requests: true\ndefault-chat-template-kwargs: {reasoning_effort: low}\n"
        "uvicorn-log-level: trace\n"
    )
    settings = merge(["--config", str(path)], {})
    assert settings.engine.override_generation_config == {"temperature": 0.5}
    assert settings.server.default_reasoning_effort == "low"
    assert (settings.server.data_parallel_size, settings.server.data_parallel_backend) == (2, "ray")
    assert settings.server.log_level == "debug"
    assert settings.notices == ()


@pytest.mark.parametrize(
    "name",
    ["attention-config", "kernel-config", "reasoning-config", "eplb-config", "model-loader-extra-config"],
)
def test_a_file_may_contain_nested_values(name: str, tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(f"{name}:\n  backend: x\n  sizes: [1, 2]\n")
    settings = merge(["--config", str(path)], {})
    assert settings.values[name].value == {"backend": "x", "sizes": [1, 2]}
    assert len(settings.notices) == 1


@pytest.mark.parametrize(
    ("given", "level"),
    [("WARN", "warning"), ("FATAL", "error"), ("CRITICAL", "error"), ("info", "info"), ("trace", "debug")],
)
def test_log_levels_accept_the_names_of_logging(given: str, level: str) -> None:
    assert merge([], {"VLLM_LOGGING_LEVEL": given}).server.log_level == level


def test_variables_of_vllm_give_notices() -> None:
    environment = {
        "VLLM_API_KEY": "k", "VLLM_LOGGING_LEVEL": "DEBUG", "VLLM_SYSTEM_START_DATE": "2026-01-01",
        "VLLM_USE_FLASHINFER_MOE_MXFP4_BF16": "1", "VLLM_ROCM_USE_AITER_MHA": "0", "VLLM_NO_USAGE_STATS": "1",
        "VLLM_SOMETHING": "1", "VLLM_OTHER": "1", "VLLM_PORT": "tcp://10.0.0.1:8000", "PATH": "/bin",
    }  # fmt: skip
    settings = merge([], environment)
    assert settings.server.log_level == "debug"
    assert settings.server.system_start_date == "2026-01-01"
    assert [notice.split(" is ")[0].split(": ")[0] for notice in settings.notices] == [
        "VLLM_NO_USAGE_STATS", "VLLM_ROCM_USE_AITER_MHA", "VLLM_USE_FLASHINFER_MOE_MXFP4_BF16",
        "not read by Chorale",
    ]  # fmt: skip
    assert settings.notices[-1].endswith("VLLM_OTHER, VLLM_SOMETHING")
