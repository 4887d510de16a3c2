"""Sizes of the tier of host memory. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass

from chorale.config.engine import EngineConfig
from chorale.errors import ConfigError
from chorale.runtime.sizing.memory import GIB, KvGeometry, gib

MOST_STAGING = GIB // 2  # of device memory, for pages that leave
SAVED_AT_ONCE = 2 * GIB  # that may leave before one step, if its prompts displace less: 40 ms on PCIe 5
LOAD_STAGING = GIB // 8  # for pages that return: copied piece by piece
GPU_LEAST_HIT = 256  # tokens that a GPU computes sooner than their pages return


@dataclass(frozen=True, slots=True)
class HostTierSizes:
    """Pages. ``saved``: that may leave before one step; ``staged``: device memory for those that leave, of
    which a step waits for the first if there are more; ``loaded``: for a piece of those that return."""

    num_slots: int
    saved: int
    staged: int
    loaded: int
    page_bytes: int  # of one rank

    @property
    def device_bytes(self) -> int:
        """Memory of each device."""
        return (self.staged + self.loaded) * self.page_bytes

    @property
    def host_bytes(self) -> int:
        """Memory of the host for each rank."""
        return self.num_slots * self.page_bytes

    def __str__(self) -> str:
        return f"{gib(self.host_bytes)} of host memory for {self.num_slots} pages"


def host_tier_sizes(config: EngineConfig, geometry: KvGeometry, num_tokens: int) -> HostTierSizes | None:
    """``num_tokens``: of the largest step. Returns None if no memory is requested.

    As in vLLM, the size is that of all ranks together. Raises ``ConfigError`` if it holds no page.
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
    blocks = 2 * -(-num_tokens // geometry.block_size) + 8  # of both groups; rows begin blocks at any time
    saved = min(num_slots, max(blocks, SAVED_AT_ONCE // page))
    return HostTierSizes(
        num_slots=num_slots,
        saved=saved,
        staged=max(1, min(blocks, saved, MOST_STAGING // page)),
        loaded=max(1, min(num_slots, LOAD_STAGING // page)),
        page_bytes=page,
    )


def check_host_memory(config: EngineConfig, available: int) -> None:
    """Raises ``ConfigError`` if the host's memory is too small. ``available``: bytes."""
    asked = int((config.kv_offloading_size or 0) * GIB)
    if asked > available:
        raise ConfigError(
            f"--kv-offloading-size {config.kv_offloading_size:g}: {gib(asked)} of host memory for KV pages; "
            f"{gib(available)} are available"
        )
