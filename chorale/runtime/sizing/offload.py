"""Sizes of the host memory tier. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass

from chorale.config.engine import EngineConfig
from chorale.errors import ConfigError
from chorale.model.config import ModelConfig
from chorale.runtime.sizing.memory import GIB, KvGeometry, adapter_bytes, gib

MOST_STAGING = GIB // 2  # maximum device memory to stage saved pages
SAVED_AT_ONCE = 2 * GIB  # allowance for saved pages before one step: 40 ms on PCIe 5
LOAD_STAGING = GIB // 8  # device memory to stage loaded pages, which are copied piece by piece
GPU_LEAST_HIT = 256  # a GPU computes fewer tokens faster than it loads their pages


@dataclass(frozen=True, slots=True)
class HostTierSizes:
    """Numbers of pages. ``saved``: maximum saved before one step; ``staged``: staging buffer for saved pages,
    for which a step waits when it is full; ``loaded``: staging buffer for one piece of a load."""

    num_slots: int
    saved: int
    staged: int
    loaded: int
    page_bytes: int  # bytes of a page on one rank

    @property
    def device_bytes(self) -> int:
        """Memory on each device."""
        return (self.staged + self.loaded) * self.page_bytes

    @property
    def host_bytes(self) -> int:
        """Host memory for each rank."""
        return self.num_slots * self.page_bytes

    def __str__(self) -> str:
        return f"{gib(self.host_bytes)} of host memory for {self.num_slots} pages"


def host_tier_sizes(config: EngineConfig, geometry: KvGeometry, num_tokens: int) -> HostTierSizes | None:
    """Return the sizes, or None if no memory is requested. ``num_tokens``: tokens of the largest step.

    As in vLLM, the requested size is the sum over all ranks. Raises ``ConfigError`` if it holds no page.
    """
    if not config.kv_offloading_size or not config.enable_prefix_caching:
        return None
    page, ranks = geometry.bytes_per_block, config.tensor_parallel_size
    num_slots = int(config.kv_offloading_size * GIB) // (page * ranks)
    if num_slots < 1:
        raise ConfigError(
            f"--kv-offloading-size {config.kv_offloading_size:g}: a page of {geometry.block_size} tokens "
            f"takes {gib(page * ranks)}"
        )
    # Blocks of both groups; rows start blocks at any time.
    blocks = 2 * -(-num_tokens // geometry.block_size) + 8
    saved = min(num_slots, max(blocks, SAVED_AT_ONCE // page))
    return HostTierSizes(
        num_slots=num_slots,
        saved=saved,
        staged=max(1, min(blocks, saved, MOST_STAGING // page)),
        loaded=max(1, min(num_slots, LOAD_STAGING // page)),
        page_bytes=page,
    )


def check_host_memory(config: EngineConfig, model: ModelConfig, available: int) -> None:
    """Raises ``ConfigError`` if the host's memory is too small. ``available``: bytes."""
    num_host = (config.max_cpu_loras or config.max_loras) if config.enable_lora else 0
    adapters = num_host * adapter_bytes(model, config.max_lora_rank, "float32", experts=False)
    if adapters > available:
        raise ConfigError(f"--max-cpu-loras {num_host} need {gib(adapters)}; {gib(available)} are available")
    asked = int((config.kv_offloading_size or 0) * GIB)
    if asked > available:
        raise ConfigError(
            f"--kv-offloading-size {config.kv_offloading_size:g}: {gib(asked)} of host memory for KV pages; "
            f"{gib(available)} are available"
        )
