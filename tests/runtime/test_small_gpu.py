"""gpt-oss-20b on GPUs with little memory: which sizes they get, and that other GPUs keep theirs."""

from __future__ import annotations

from typing import Any

import pytest

from chorale.config.engine import EngineConfig
from chorale.config.speculative import SpeculativeConfig
from chorale.errors import ConfigError
from chorale.machine.gpus import find_gpu, hardware_of
from chorale.machine.hardware import DRIVER_BYTES, Hardware
from chorale.model.config_writer import SHAPES, make_config
from chorale.runtime.sizing.memory import GIB, embedding_bytes, weight_bytes
from chorale.runtime.sizing.resolve import Resolved, resolve
from tests.runtime.test_memory import pool_bytes

MODELS = {size: make_config(**SHAPES[size]) for size in ("20b", "120b")}
SMALL = ("rtx-4080", "rtx-a4000", "rtx-4060-ti-16gb", "rtx-4070-ti-super", "rtx-5060-ti", "rtx-5080")
EMBEDDING = embedding_bytes(MODELS["20b"], "bfloat16")


def decide(gpu: str | Hardware, size: str = "20b", **asked: Any) -> Resolved:
    hardware = hardware_of(find_gpu(gpu)) if isinstance(gpu, str) else gpu
    return resolve(EngineConfig(**asked), MODELS[size], hardware, can_overlap=True, can_capture=True)


def device_bytes(found: Resolved) -> int:
    """What the driver, weights, workspace and pool take on the GPU."""
    weights = weight_bytes(MODELS["20b"], "bfloat16") - (EMBEDDING if found.host_embedding else 0)
    return DRIVER_BYTES + weights + found.workspace + pool_bytes(found)


@pytest.mark.parametrize("gpu", SMALL)
def test_20b_fits_on_16_gb_with_two_contexts_of_32k(gpu: str) -> None:
    found = decide(gpu, max_model_len=32768)
    assert found.host_embedding
    assert found.workspace <= 0.6 * GIB
    assert found.limits.num_blocks >= 2 * found.geometry.blocks_for(32768)
    assert (found.limits.max_num_batched_tokens, found.limits.max_num_seqs) == (512, 16)
    assert found.graph_rows[-1] == 16
    assert not found.mixed_graphs
    allowed = 0.92 * hardware_of(find_gpu(gpu)).total_bytes
    assert allowed - found.geometry.bytes_per_block <= device_bytes(found) <= allowed
    (note,) = found.notes
    assert "embedding stays in host memory" in note


def test_20b_fits_into_15_gib_of_a_larger_gpu() -> None:
    """The share that --gpu-memory-utilization leaves decides, not the memory of the card."""
    h100 = hardware_of(find_gpu("h100"))
    found = decide(h100, max_model_len=32768, gpu_memory_utilization=15 * GIB / h100.total_bytes)
    assert found.host_embedding
    assert found.workspace <= 0.6 * GIB
    assert device_bytes(found) == pytest.approx(15 * GIB, rel=0.001)
    assert found.limits.num_blocks >= 2 * found.geometry.blocks_for(32768)


@pytest.mark.parametrize(
    ("gpu", "size", "blocks"), [("h100", "20b", 35512), ("h100", "120b", 2535), ("h200", "20b", 73669)]
)
def test_gpus_with_enough_memory_keep_their_sizes(gpu: str, size: str, blocks: int) -> None:
    found = decide(gpu, size)
    assert (found.limits.max_num_seqs, found.limits.max_num_batched_tokens) == (1024, 8192)
    assert found.limits.num_blocks == blocks
    assert (found.host_embedding, found.is_lean, found.mixed_graphs, found.notes) == (False, False, True, ())


@pytest.mark.parametrize("gpu", ["l4", "rtx-4090"])
def test_24_gb_hold_the_longest_context_with_smaller_steps(gpu: str) -> None:
    found = decide(gpu)
    assert (found.limits.max_num_seqs, found.limits.max_num_batched_tokens) == (256, 2048)
    assert found.limits.max_model_len == 131072
    assert (found.host_embedding, found.is_lean, found.mixed_graphs) == (False, False, True)


def test_requested_sizes_are_kept_and_cost_pool() -> None:
    pool = decide("rtx-4080", max_model_len=32768, kv_cache_memory_bytes=GIB)
    assert pool.is_lean
    assert GIB - pool.geometry.bytes_per_block < pool_bytes(pool) <= GIB
    usual = decide("rtx-4080", max_model_len=32768)
    more = decide("rtx-4080", max_model_len=32768, max_num_seqs=32, max_num_batched_tokens=1024)
    assert (more.limits.max_num_seqs, more.limits.max_num_batched_tokens) == (32, 1024)
    assert more.workspace > usual.workspace
    assert pool_bytes(more) < pool_bytes(usual)
    drafts = SpeculativeConfig(method="ngram", num_speculative_tokens=4)
    assert decide("rtx-4080", max_model_len=32768, speculative_config=drafts).workspace > usual.workspace


def test_the_operator_decides_where_the_embedding_is() -> None:
    usual, host = decide("h100"), decide("h100", cpu_offload_params=("embedding",))
    assert host.host_embedding
    assert host.limits.max_num_seqs == 1024
    gained = pool_bytes(host) - pool_bytes(usual)
    assert EMBEDDING - host.geometry.bytes_per_block < gained < EMBEDDING + host.geometry.bytes_per_block
    short = decide("rtx-4080", cpu_offload_params=("none",))
    assert not short.host_embedding
    assert short.limits.max_model_len < 32768
    with pytest.raises(ConfigError, match="Pick one"):
        decide("rtx-4080", cpu_offload_params=("none",), max_model_len=32768)
    cpu = Hardware("cpu", "CPU", 64 * GIB, 64 * GIB)
    asked = EngineConfig(cpu_offload_params=("embedding",))
    assert not resolve(asked, MODELS["20b"], cpu).host_embedding


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ({"cpu_offload_params": ("lm_head",)}, "lm_head: must be embedding or none"),
        ({"cpu_offload_params": ("embedding",), "tensor_parallel_size": 2}, "ranks"),
        ({"cpu_offload_params": ("embed_tokens",), "head": True}, "draft head"),
    ],
)
def test_what_cannot_stay_in_host_memory_is_refused(asked: dict[str, Any], why: str) -> None:
    if asked.pop("head", False):
        asked["speculative_config"] = SpeculativeConfig(method="eagle3", num_speculative_tokens=2)
    with pytest.raises(ConfigError, match=f"--cpu-offload-params.*{why}"):
        decide("h100", **asked)
    asked["cpu_offload_params"] = None  # not requested: the embedding is on the GPU
    assert not decide("l4", **asked).host_embedding


def test_other_kernels_than_tritons_do_not_read_host_memory() -> None:
    asked = EngineConfig(cpu_offload_params=("embedding",))
    with pytest.raises(ConfigError, match="Triton"):
        resolve(asked, MODELS["20b"], hardware_of(find_gpu("h100")), can_capture=False)


@pytest.mark.parametrize(
    ("gpu", "size", "asked", "is_made"),
    [
        ("h200", "20b", {}, True),
        ("h200", "120b", {}, True),
        ("h100", "120b", {}, False),  # a sixth of what is left
        ("a100-80gb", "20b", {}, False),  # whose kernels read bfloat16
        ("h200", "20b", {"batch_invariant": True}, False),
        ("h200", "20b", {"dtype": "float32"}, False),
        ("h200", "20b", {"gpu_memory_utilization": 0.25}, False),
    ],
)
def test_dense_weights_get_a_small_copy_if_there_is_room(
    gpu: str, size: str, asked: dict[str, Any], is_made: bool
) -> None:
    assert decide(gpu, size, **asked).compact is is_made


def test_a_pool_that_only_fits_without_the_copy_is_allocated() -> None:
    most = decide("h200", batch_invariant=True).limits.num_blocks
    asked = decide("h200", num_gpu_blocks_override=most)
    assert (asked.compact, asked.limits.num_blocks) == (False, most)
    assert asked.limits.max_num_seqs == 1024
