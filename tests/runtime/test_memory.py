"""Memory arithmetic and resolved defaults, on machines that are only numbers."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from chorale.config.engine import EngineConfig
from chorale.engine.kv_cache.cache import HybridCache
from chorale.errors import ConfigError
from chorale.kernels.triton import tuning
from chorale.kernels.triton.reduce.memory import Layout as ExchangeLayout
from chorale.machine import nvidia_smi
from chorale.machine.hardware import DRIVER_BYTES, Hardware
from chorale.machine.nvidia_smi import GpuUser
from chorale.measure.bench.checkpoint_writer import write_random_checkpoint
from chorale.model.checkpoint import Checkpoint
from chorale.model.config import ModelConfig
from chorale.model.config_writer import make_config
from chorale.model.layouts import Layout
from chorale.model.lora.read import read_adapter
from chorale.runtime.sizing.memory import (
    GIB,
    NCCL_BYTES,
    adapter_bytes,
    addend_bytes,
    kv_geometry,
    peer_bytes,
    rank_bytes,
    slot_bytes,
    weight_bytes,
)
from chorale.runtime.sizing.offload import check_host_memory
from chorale.runtime.sizing.resolve import Resolved, resolve
from tests.support.device.lora import RANK, write_adapter


def gpt_oss(layers: int, experts: int) -> ModelConfig:
    return make_config(
        layers=layers, experts=experts, hidden=2880, inter=2880, heads=64, kv_heads=8, head_dim=64
    )


OSS_20B, OSS_120B = gpt_oss(24, 32), gpt_oss(36, 128)
GATHERED = 2 * 256 * 201088 * 4  # logits of ranks that share no memory, bytes
TINY = make_config(layers=2, experts=4, hidden=64, inter=64, heads=4, kv_heads=2, head_dim=16, vocab=512)


def cpu(gib: float) -> Hardware:
    return Hardware("cpu", "CPU", int(gib * GIB), int(gib * GIB))


H200 = Hardware("cuda", "NVIDIA H200", 141 * 10**9, 140 * 10**9)


def decide(model: ModelConfig, hardware: Hardware, **asked: Any) -> Resolved:
    return resolve(EngineConfig(**asked), model, hardware, can_overlap=hardware.kind == "cuda")


def test_published_sizes() -> None:
    """The hub's files: 13.76 GB (20b) and 65.25 GB (120b), of which weight bytes are all but the headers."""
    assert weight_bytes(OSS_20B, "bfloat16") / 1e9 == pytest.approx(13.76, rel=0.01)
    assert weight_bytes(OSS_120B, "bfloat16") / 1e9 == pytest.approx(65.25, rel=0.01)
    # K and V of 8 heads of 64 in bf16, 12 of the 24 layers see everything: 24.6 kB a token.
    assert kv_geometry(OSS_20B, 16, "bfloat16").bytes_per_block == 16 * 12 * 2 * 8 * 64 * 2


@pytest.mark.parametrize("layout", ["published", "dense", "reference"])
def test_weight_bytes_are_those_of_the_files(layout: Layout, tmp_path: Path) -> None:
    """All but the headers, whichever layout the folder's own config.json speaks of."""
    write_random_checkpoint(tmp_path, TINY, layout=layout)
    config = ModelConfig.load(tmp_path)
    assert config.dense_experts == (layout == "dense")
    on_disk = Checkpoint(tmp_path, config).num_bytes
    assert weight_bytes(config, "bfloat16") == pytest.approx(on_disk, rel=0.01)
    assert weight_bytes(config, "float32") > on_disk


@pytest.mark.parametrize("block_size", [1, 4, 16, 64, 128])
def test_blocks_and_tokens_agree_with_the_cache(block_size: int) -> None:
    geometry = kv_geometry(OSS_20B, block_size, "bfloat16")
    for num_blocks in (2, 3, 7, 20, 64, 257, 1000):
        assert geometry.tokens_in(num_blocks) == HybridCache(num_blocks, block_size, 128).capacity
    for num_tokens in (1, 2, 127, 128, 129, 1000, 131072):
        blocks = geometry.blocks_for(num_tokens)
        assert geometry.tokens_in(blocks) >= num_tokens
        assert geometry.tokens_in(blocks - 1) < num_tokens


def test_adapters_take_memory_of_the_device_and_of_the_host(tmp_path: Path) -> None:
    few, many = (adapter_bytes(OSS_20B, 16, "bfloat16", experts=each) for each in (False, True))
    assert (few / 2**20, many / 2**20) == pytest.approx((17.3, 354.8), abs=0.1)
    asked = {"enable_lora": True, "max_loras": 8, "max_cpu_loras": 200}
    plain, found = decide(OSS_20B, H200), decide(OSS_20B, H200, **asked)
    pages = plain.limits.num_blocks - found.limits.num_blocks
    more = addend_bytes(OSS_20B, plain.limits.max_num_batched_tokens, "bfloat16")
    reserved = 8 * slot_bytes(OSS_20B, 16, "bfloat16") + more
    assert 8 * many < reserved < 8.3 * many + more
    assert pages * plain.geometry.bytes_per_block == pytest.approx(reserved, rel=0.01)
    assert {"max_loras", "max_cpu_loras"} <= {each.name for each in found.decisions}
    check_host_memory(EngineConfig(**asked), OSS_20B, 200 * 2 * few)  # files may be float32
    with pytest.raises(ConfigError, match="--max-cpu-loras 200"):
        check_host_memory(EngineConfig(**asked), OSS_20B, 200 * 2 * few - 1)
    write_adapter(tmp_path, TINY, "attention")
    own = read_adapter(tmp_path, TINY).num_bytes
    assert own <= adapter_bytes(TINY, RANK, "float32", experts=False) < 2 * own


def test_defaults_by_device() -> None:
    small, large, gpu = decide(TINY, cpu(16)), decide(OSS_20B, cpu(64)), decide(OSS_20B, H200)
    assert (small.dtype, large.dtype, gpu.dtype) == ("float32", "bfloat16", "bfloat16")
    assert (small.limits.block_size, gpu.limits.block_size) == (16, 64)
    assert (small.limits.max_num_seqs, large.limits.max_num_seqs, gpu.limits.max_num_seqs) == (64, 16, 1024)
    assert (small.limits.max_num_batched_tokens, gpu.limits.max_num_batched_tokens) == (2048, 8192)
    assert (small.limits.prompt_delay, gpu.limits.prompt_delay) == (0.1, 0.012)
    assert (small.limits.async_scheduling, gpu.limits.async_scheduling) == (0, 1)
    assert gpu.limits.max_model_len == 131072
    assert all(decision.reason for decision in gpu.decisions)


def test_the_pool_stays_within_the_memory() -> None:
    for hardware in (cpu(20), cpu(64), H200):
        found = decide(OSS_20B, hardware)
        pool = found.limits.num_blocks * found.geometry.bytes_per_block
        assert pool + weight_bytes(OSS_20B, "bfloat16") < 0.92 * hardware.total_bytes
        assert found.geometry.tokens_in(found.limits.num_blocks) >= found.limits.max_model_len
    tiny = decide(TINY, cpu(16), max_model_len=64, max_num_seqs=2)
    assert tiny.limits.num_blocks == 2 * tiny.geometry.blocks_for(64)  # more would never be used


def holding(gib: float) -> Hardware:
    """A GPU of which other processes hold some memory."""
    label = "GPU 0 (NVIDIA H200, GPU-1a2b)"
    free = H200.total_bytes - int(gib * GIB) - DRIVER_BYTES
    return replace(H200, free_bytes=free, label=label, uuid="GPU-1a2b")


def pool_bytes(found: Resolved) -> int:
    return found.limits.num_blocks * found.geometry.bytes_per_block


def test_two_engines_share_a_gpu_by_their_utilization() -> None:
    """As in vLLM, it is the engine's own share of the whole GPU, whatever others hold."""
    half = 0.45 * H200.total_bytes / GIB
    first, second = (decide(OSS_20B, holding(held), gpu_memory_utilization=0.45) for held in (0, half))
    assert first.limits.num_blocks == second.limits.num_blocks
    assert (first.notes, second.notes) == ((), ())


def test_a_pool_is_not_larger_than_what_other_processes_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    users = [GpuUser(4711, "/usr/bin/python3", 40 * GIB), GpuUser(os.getpid(), "python3", GIB)]
    monkeypatch.setattr(nvidia_smi, "users", lambda uuid: users if uuid == "GPU-1a2b" else [])
    alone, shared = decide(OSS_20B, holding(0)), decide(OSS_20B, holding(40))
    assert 25 * GIB < pool_bytes(alone) - pool_bytes(shared) < 40 * GIB  # the margin of 8 % becomes 5 %
    weights = weight_bytes(OSS_20B, "bfloat16")
    assert pool_bytes(shared) + weights < 0.95 * holding(40).free_bytes
    assert alone.notes == ()
    (note,) = shared.notes
    assert (
        "other processes hold 40.00 GiB of GPU 0 (NVIDIA H200, GPU-1a2b): 4711 (python3, 40.00 GiB)" in note
    )
    assert f"{os.getpid()} (" not in note


def test_a_gpu_that_another_server_fills(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvidia_smi, "users", lambda uuid: [GpuUser(4711, "python3", 120 * GIB)])
    for asked in ({}, {"max_model_len": 4096}):
        with pytest.raises(ConfigError) as caught:
            decide(OSS_20B, holding(120), **asked)
        message = caught.value.message
        assert "GPU 0 (NVIDIA H200, GPU-1a2b) has 10.69 GiB free of 131.32 GiB" in message
        assert "other processes hold 120.00 GiB" in message
        assert "4711 (python3, 120.00 GiB)" in message
        assert "another GPU (CUDA_VISIBLE_DEVICES)" in message
        assert "--gpu-memory-utilization" in message
        assert "kv-cache-memory-bytes" not in message  # that memory is not there


def test_an_npu_that_another_server_fills(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without questions to NVIDIA's driver."""
    monkeypatch.delattr(nvidia_smi, "users")
    hardware = Hardware("npu", "910B", 64 * GIB, 10 * GIB)
    with pytest.raises(ConfigError) as caught:
        decide(OSS_20B, hardware)
    message = caught.value.message
    assert message.startswith("910B has 10.00 GiB free of 64.00 GiB; other processes hold 53.38 GiB of 910B")
    assert "another GPU (ASCEND_RT_VISIBLE_DEVICES)" in message


def test_a_gpu_that_is_too_small_says_so() -> None:
    small = Hardware("cuda", "NVIDIA A10", 24 * GIB, 24 * GIB - DRIVER_BYTES)
    with pytest.raises(ConfigError, match=r"NVIDIA A10 has 23.* GiB free of 24.* Weights and act") as caught:
        decide(OSS_120B, small)
    assert "--tensor-parallel-size 2, which shares the weights" in caught.value.message
    assert "other processes" not in caught.value.message


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("tokens", [512, 8192, 8193])
def test_the_memory_of_exchanges_is_that_of_the_kernels(ranks: int, tokens: int) -> None:
    few = min(tokens, tuning.one_shot_rows(ranks))
    exact = ExchangeLayout(ranks, OSS_120B.hidden_size, tokens, few, torch.bfloat16).num_bytes
    assert exact <= peer_bytes(OSS_120B, tokens, "bfloat16") <= exact + 64 * 2**20
    config = EngineConfig(tensor_parallel_size=ranks)
    assert rank_bytes(config, OSS_120B, tokens, "bfloat16") == NCCL_BYTES + peer_bytes(
        OSS_120B, tokens, "bfloat16"
    )
    alone = replace(config, disable_custom_all_reduce=True)
    assert rank_bytes(alone, OSS_120B, tokens, "bfloat16") == NCCL_BYTES + GATHERED


def test_more_tokens_a_step_leave_a_smaller_pool_on_ranks() -> None:
    few, many = (
        decide(OSS_120B, H200, tensor_parallel_size=2, max_num_batched_tokens=tokens, max_num_seqs=64)
        for tokens in (2048, 16384)
    )
    config = EngineConfig(tensor_parallel_size=2)
    difference = peer_bytes(OSS_120B, 16384, "bfloat16") - peer_bytes(OSS_120B, 2048, "bfloat16")
    assert pool_bytes(few) - pool_bytes(many) >= difference
    assert rank_bytes(EngineConfig(), OSS_120B, 2048, "bfloat16") == 0
    assert rank_bytes(config, OSS_120B, 2048, "bfloat16", has_peers=False) == NCCL_BYTES + GATHERED


def test_a_cpu_gives_at_most_sixteen_gibibytes() -> None:
    pools = [decide(OSS_20B, cpu(gib), max_num_seqs=1024) for gib in (1024, 2048)]
    assert pools[0].limits.num_blocks == pools[1].limits.num_blocks
    size = pools[0].limits.num_blocks * pools[0].geometry.bytes_per_block
    assert size == pytest.approx(16 * GIB, rel=0.01)


def test_the_models_default_length_is_reduced_to_the_pool() -> None:
    found = decide(OSS_20B, cpu(20))
    assert 2 <= found.limits.max_model_len < 131072
    assert str(found.limits.max_model_len) in found.notes[0]
    asked = decide(OSS_20B, cpu(20), max_model_len=4096)
    assert (asked.limits.max_model_len, asked.notes) == (4096, ())


def test_more_log_probabilities_than_any_request_gets_are_a_note() -> None:
    assert [decide(TINY, cpu(16), max_logprobs=asked).max_logprobs for asked in (0, 5, 20)] == [0, 5, 20]
    for asked in (-1, 50):
        found = decide(TINY, cpu(16), max_logprobs=asked)
        assert found.max_logprobs == 20
        assert "max_logprobs" in found.notes[-1]


def test_a_requested_length_that_does_not_fit_names_working_remedies() -> None:
    asked = {"max_model_len": 131072}
    with pytest.raises(ConfigError, match=r"GiB more\. Pick one") as refused:
        decide(OSS_20B, cpu(18), **asked)
    fits = re.search(r"--max-model-len (\d+) \(saves", refused.value.message)
    enough = re.search(r"--kv-cache-memory-bytes (\d+)", refused.value.message)
    assert fits is not None
    assert enough is not None
    assert decide(OSS_20B, cpu(18), max_model_len=int(fits[1])).limits.max_model_len == int(fits[1])
    decide(OSS_20B, cpu(18), kv_cache_memory_bytes=int(enough[1]), **asked)
    with pytest.raises(ConfigError):
        decide(OSS_20B, cpu(18), kv_cache_memory_bytes=int(enough[1]) - 10**6, **asked)


def test_the_remedies_depend_on_how_the_size_was_chosen() -> None:
    """An override counts before bytes and memory are looked at, and bytes before the share of the memory."""
    with pytest.raises(ConfigError, match="Pick one") as refused:
        decide(OSS_20B, H200, max_model_len=4096, num_gpu_blocks_override=20)
    ways = refused.value.message.partition("Pick one: ")[2]
    enough = re.search(r"--num-gpu-blocks-override (\d+)", ways)
    assert enough is not None
    assert not re.search("kv-cache|utilization", ways)
    decide(OSS_20B, H200, max_model_len=4096, num_gpu_blocks_override=int(enough[1]))
    with pytest.raises(ConfigError, match="--kv-cache-memory-bytes") as refused:
        decide(OSS_20B, H200, max_model_len=4096, kv_cache_memory_bytes=10**6)
    assert "utilization" not in refused.value.message


@pytest.mark.parametrize("hardware", [cpu(16), H200], ids=["cpu", "H200"])
@pytest.mark.parametrize(
    "asked",
    [
        {"num_gpu_blocks_override": 10**9},
        {"kv_cache_memory_bytes": 2**40},
        {"num_gpu_blocks_override": 1024, "block_size": 10**7},
    ],
)
def test_a_pool_beyond_the_memory_is_refused(hardware: Hardware, asked: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(asked)).replace('_', '-')}: .* KV blocks take .* has"):
        decide(OSS_20B, hardware, **asked)


def test_a_pool_without_blocks_is_an_error() -> None:
    with pytest.raises(ConfigError, match="the weights leave no memory"):
        decide(OSS_120B, cpu(16))


@pytest.mark.parametrize(
    ("asked", "word"),
    [
        ({"tensor_parallel_size": 3}, "tensor-parallel-size"),
        ({"max_model_len": 200_000}, "131072"),
    ],
)
def test_settings_that_cannot_run_are_refused_by_name(asked: dict[str, Any], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        decide(OSS_20B, H200, **asked)


@pytest.mark.parametrize("hardware", [H200, cpu(23)])
def test_rows_whose_tables_are_beyond_the_memory_are_refused(hardware: Hardware) -> None:
    """What a row's table takes is known before anything is read; a hundred thousand rows are fine."""
    assert decide(TINY, hardware, max_num_seqs=100_000).limits.max_num_seqs == 100_000
    with pytest.raises(ConfigError, match=r"^--max-num-seqs 1000000000: their block tables take \d+"):
        decide(TINY, hardware, max_num_seqs=10**9)


def test_rows_beyond_the_vocabulary_are_refused() -> None:
    """They have no text: the first to be sampled, or among the likeliest, would end its request."""
    with pytest.raises(ConfigError, match=r"config\.json: vocab_size: 201216 is more than"):
        decide(replace(OSS_20B, vocab_size=201216), H200)


def test_requested_settings_are_kept() -> None:
    asked = {"block_size": 8, "max_num_seqs": 3, "max_num_batched_tokens": 99, "num_gpu_blocks_override": 77}
    limits = decide(TINY, cpu(8), max_model_len=100, async_scheduling=True, **asked).limits
    assert (limits.block_size, limits.max_num_seqs, limits.max_num_batched_tokens) == (8, 3, 99)
    assert (limits.num_blocks, limits.max_model_len, limits.async_scheduling) == (77, 100, 1)


def test_a_small_model_does_not_take_the_machine() -> None:
    """On a CPU: all rows at 4,096 tokens, or one at full length, whichever is more."""
    limits = decide(TINY, cpu(64)).limits
    geometry = kv_geometry(TINY, 16, "float32")
    assert limits.num_blocks == max(64 * geometry.blocks_for(4096), geometry.blocks_for(131072))


@pytest.mark.parametrize("name", ["fp8", "fp8_e4m3"])
def test_fp8_blocks_take_half_the_memory_of_bfloat16(name: str) -> None:
    small, large = decide(OSS_20B, H200, kv_cache_dtype=name), decide(OSS_20B, H200)
    assert (small.kv_dtype, large.kv_dtype) == ("fp8_e4m3", "bfloat16")
    assert 2 * small.geometry.bytes_per_block == large.geometry.bytes_per_block
    assert small.limits.num_blocks in (2 * large.limits.num_blocks, 2 * large.limits.num_blocks + 1)
    # One block of 20b: 12 slots, K and V, 8 heads of 64, one byte each.
    assert small.geometry.bytes_per_block == 64 * 12 * 2 * 8 * 64
    assert not small.notes


def test_fp8_blocks_are_refused_where_the_ops_have_none() -> None:
    with pytest.raises(ConfigError, match="--kv-cache-dtype fp8: this op back end"):
        resolve(EngineConfig(kv_cache_dtype="fp8"), OSS_20B, H200, supports_fp8_kv=False)
    assert resolve(EngineConfig(), OSS_20B, H200, supports_fp8_kv=False).kv_dtype == "bfloat16"


def test_a_pool_that_is_too_small_names_fp8_as_a_way_out() -> None:
    with pytest.raises(ConfigError, match="--kv-cache-dtype fp8 \\(saves"):
        decide(OSS_20B, H200, max_model_len=131072, kv_cache_memory_bytes=2**28)


def test_graphs_of_mixed_steps_can_be_left_out_alone() -> None:
    """vLLM's cudagraph_mode FULL_DECODE_ONLY: decode steps stay captured, and the pool gets the memory."""

    def with_graphs(**asked: Any) -> Resolved:
        return resolve(EngineConfig(**asked), OSS_20B, H200, can_overlap=True, can_capture=True)

    both, decodes = with_graphs(), with_graphs(mixed_cuda_graphs=False)
    assert both.mixed_graphs
    assert decodes.graph_rows == both.graph_rows
    assert not decodes.mixed_graphs
    assert decodes.limits.num_blocks > both.limits.num_blocks
    assert not with_graphs(enforce_eager=True).mixed_graphs
