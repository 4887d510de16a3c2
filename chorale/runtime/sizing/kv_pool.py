"""The size of the KV pool: as requested, or from the memory that is left. Torch-free."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

from chorale.config.engine import VALID_SIZES, EngineConfig
from chorale.engine.types import CacheGroup
from chorale.errors import ConfigError
from chorale.machine import nvidia_smi
from chorale.machine.hardware import DRIVER_BYTES, Hardware
from chorale.machine.platforms import PLATFORMS
from chorale.runtime.sizing.memory import GIB, KvGeometry, gib

CPU_SHARE = 0.25  # share of the memory left after the weights: a CPU host has other work
CPU_MOST = 16 * GIB
LONG_CONTEXT = 32768  # tokens: a GPU with room for fewer has little memory (``economy.py``)
LITTLE_CONTEXT = 4096  # tokens: less is a short chat, and is reported
CPU_TOKENS = 4096  # tokens per row; a CPU is too slow for all rows to be longer at the same time
NOTABLE = GIB  # less memory held by other processes on a GPU is not reported


@dataclass(frozen=True, slots=True)
class PoolSize:
    """``missing``: bytes by which weights and activations exceed the budget, or, for a requested size on a
    CPU, they and the pool the free memory. ``is_shared``: memory of other processes limited the size.
    ``is_roomy``: it has room for a long request, and the memory is there.
    """

    num_blocks: int
    reason: str
    missing: int = 0
    is_shared: bool = False
    is_roomy: bool = True


@dataclass(frozen=True, slots=True)
class PoolRequest:
    """Inputs of the pool's size. ``fixed``: bytes of weights and activations; ``least``: bytes of a roomy
    pool."""

    geometry: KvGeometry
    max_num_seqs: int
    max_model_len: int
    fixed: int
    least: int = 0

    def useful_blocks(self, num_tokens: int) -> int:
        """Return the blocks for every row at ``num_tokens`` and one row at full length."""
        every = self.max_num_seqs * self.geometry.blocks_for(min(num_tokens, self.max_model_len))
        return max(every, self.geometry.blocks_for(self.max_model_len))


def size_pool(config: EngineConfig, hardware: Hardware, request: PoolRequest) -> PoolSize:
    """Returns the number of blocks: from the override, the requested bytes, or a share of the memory.

    Raises ``ConfigError`` if that exceeds the total memory.
    """
    per_block = request.geometry.bytes_per_block
    asked = _asked_size(config, per_block)
    budget, reason, is_shared = _budget(config, hardware, request.fixed)
    if asked is not None:
        _check_memory(asked, per_block, hardware)
        if hardware.kind != "cpu":
            return replace(asked, is_roomy=asked.num_blocks * per_block <= budget)
        wanted = request.fixed + asked.num_blocks * per_block
        return replace(asked, missing=max(wanted - hardware.free_bytes, 0))
    blocks = max(budget, 0) // per_block
    length = min(request.max_model_len, CPU_TOKENS if hardware.kind == "cpu" else request.max_model_len)
    useful = request.useful_blocks(length)
    if blocks > useful:
        return PoolSize(useful, f"room for {request.max_num_seqs} sequences of {length} tokens")
    wanted = LONG_CONTEXT if config.max_model_len is None else max(length, LONG_CONTEXT)
    enough = max(request.geometry.blocks_for(wanted), request.least // per_block)
    return PoolSize(blocks, reason, max(-budget, 0), is_shared, blocks >= min(enough, useful))


def _asked_size(config: EngineConfig, per_block: int) -> PoolSize | None:
    if config.num_gpu_blocks_override is not None:
        return PoolSize(config.num_gpu_blocks_override, "--num-gpu-blocks-override")
    if config.kv_cache_memory_bytes is not None:
        return PoolSize(config.kv_cache_memory_bytes // per_block, "--kv-cache-memory-bytes")
    return None


def _check_memory(size: PoolSize, per_block: int, hardware: Hardware) -> None:
    """Compare with the total memory, not the free memory, which may grow; a failed allocation is reported."""
    wanted, most = size.num_blocks * per_block, hardware.total_bytes
    if wanted > most:
        raise ConfigError(
            f"{size.reason}: {size.num_blocks} KV blocks take {gib(wanted)}; "
            f"{hardware.name} has {gib(most)}, which holds {most // per_block}"
        )


def check_rows(rows: int, max_model_len: int, block_size: int, hardware: Hardware) -> None:
    """Raises ``ConfigError`` if the block tables of ``rows`` rows (``Buffers``) exceed the total memory."""
    each = len(CacheGroup) * (-(-max_model_len // block_size) + 1) * 4
    if rows * each > hardware.total_bytes:
        raise ConfigError(
            f"--max-num-seqs {rows}: their block tables take {gib(rows * each)}; "
            f"{hardware.name} has {gib(hardware.total_bytes)}"
        )


def _budget(config: EngineConfig, hardware: Hardware, fixed: int) -> tuple[int, str, bool]:
    """Returns the bytes for the pool, the reason, and whether other processes' memory was the limit.

    As in vLLM, --gpu-memory-utilization is this engine's share of the whole GPU, no matter what others hold:
    two engines on a GPU take 0.45 each. It cannot exceed the free memory, of which a part also stays free.
    """
    free, total = hardware.free_bytes, hardware.total_bytes
    if hardware.kind == "cpu":
        room = free - fixed
        share = min(int(room * CPU_SHARE), CPU_MOST) if room > 0 else room
        reason = f"{CPU_SHARE:.0%} of the {gib(room)} left beside the weights, at most {gib(CPU_MOST)}"
        return share, reason, False
    part = config.gpu_memory_utilization
    own = int(total * part) - min(total - free, DRIVER_BYTES)
    left = free - min(int(total * (1 - part)), free // 20)
    if left < own:
        return left - fixed, f"{gib(left)} of the {gib(free)} free, less weights and activations", True
    return own - fixed, f"{part:.0%} of {gib(total)}, less weights and activations", False


def held_by_others(hardware: Hardware) -> int:
    """Estimate the bytes of a GPU that other processes hold; the driver's own part varies."""
    if hardware.kind == "cpu":
        return 0
    return max(hardware.total_bytes - hardware.free_bytes - DRIVER_BYTES, 0)


def who_holds(hardware: Hardware) -> str:
    """Describe the other processes on a GPU, for messages; "" if they hold little."""
    held = held_by_others(hardware)
    if held < NOTABLE:
        return ""
    listed = nvidia_smi.users(hardware.uuid) if hardware.kind == "cuda" else []
    users = [user for user in listed if user.pid != os.getpid()][:3]
    names = ", ".join(
        f"{user.pid} ({user.name.split('/')[-1]}{f', {gib(user.num_bytes)}' if user.num_bytes else ''})"
        for user in users
    )
    label = hardware.label or hardware.name
    return f"other processes hold {gib(held)} of {label}" + (f": {names}" if names else "")


def check_one_fits(
    config: EngineConfig, size: PoolSize, request: PoolRequest, kv_dtype: str, hardware: Hardware
) -> None:
    """Raises ``ConfigError`` with computed remedies if one sequence of ``max_model_len`` does not fit."""
    per_block = request.geometry.bytes_per_block
    needed = request.geometry.blocks_for(request.max_model_len)
    if size.num_blocks >= needed:
        return
    others = who_holds(hardware)
    if hardware.kind != "cpu" and (size.missing or (size.is_shared and others)):
        raise ConfigError(_no_room(config, size, needed * per_block, request.fixed, hardware, others))
    if hardware.kind == "cpu" and _asked_size(config, per_block) is None and size.num_blocks < 2:
        raise ConfigError(_no_room_on_cpu(size, request, hardware))
    missing = gib((needed - size.num_blocks) * per_block)
    ways = _ways_to_fit(config, needed, per_block, kv_dtype, hardware)
    fits = request.geometry.tokens_in(size.num_blocks)
    if fits >= 2:
        ways.insert(0, f"--max-model-len {fits} (saves {missing})")
    raise ConfigError(
        f"one sequence of --max-model-len {request.max_model_len} needs {needed} KV blocks, "
        f"{gib(needed * per_block)}; the pool has {size.num_blocks} ({size.reason}): "
        f"{missing} more. Pick one: " + "; ".join(ways)
    )


def _no_room(
    config: EngineConfig, size: PoolSize, pool: int, fixed: int, hardware: Hardware, others: str
) -> str:
    """Returns the error for a GPU with too little memory, because of the weights or other processes."""
    free, total = gib(hardware.free_bytes), gib(hardware.total_bytes)
    ways = []
    if others:
        ways += [f"another GPU ({PLATFORMS[hardware.kind].variable(os.environ)})", "end these processes"]
        ways.append("a smaller --gpu-memory-utilization for the other engines on this GPU")
    if not size.is_shared:
        ways.append(f"a larger --gpu-memory-utilization (it is {config.gpu_memory_utilization:g})")
    ways.append("a smaller --max-model-len, --max-num-seqs or --max-num-batched-tokens")
    if config.tensor_parallel_size < VALID_SIZES[-1]:
        ways.append(f"--tensor-parallel-size {2 * config.tensor_parallel_size}, which shares the weights")
    beside = f"; {others}" if others else ""
    return (
        f"{hardware.label or hardware.name} has {free} free of {total}{beside}. Weights and activations take "
        f"{gib(fixed)}, the KV blocks of one sequence of the longest length {gib(pool)}. Pick one: "
        + "; ".join(ways)
    )


def _no_room_on_cpu(size: PoolSize, request: PoolRequest, hardware: Hardware) -> str:
    """Returns the error for a CPU whose free memory holds the weights and activations, and nothing more."""
    length = min(LITTLE_CONTEXT, request.max_model_len)
    pool = request.geometry.blocks_for(length) * request.geometry.bytes_per_block
    more = size.missing + int(pool / CPU_SHARE)
    text = f"the weights leave no memory for context: {gib(more)} more are needed for {length:,} tokens"
    if hardware.free_bytes + more > hardware.total_bytes:
        return f"{text}, and this machine has only {gib(hardware.total_bytes)}"
    return f"{text}; close other programs"


def _ways_to_fit(
    config: EngineConfig, needed: int, per_block: int, kv_dtype: str, hardware: Hardware
) -> list[str]:
    """Return remedies that give ``needed`` blocks, depending on how the size was chosen (``size_pool``)."""
    if config.num_gpu_blocks_override is not None:  # the override ignores bytes and memory
        return [f"--num-gpu-blocks-override {needed}, or none"]
    total = needed * per_block
    ways = [f"--kv-cache-memory-bytes {total} (if that much is free)"]
    if hardware.kind != "cpu" and config.kv_cache_memory_bytes is None:
        ways.append("a larger --gpu-memory-utilization")
    if kv_dtype == "float32":
        ways.append(f"--kv-cache-dtype bfloat16 (saves {gib(total // 2)})")
    if kv_dtype == "bfloat16" and hardware.kind != "cpu" and not hardware.decodes_experts:
        ways.append(f"--kv-cache-dtype fp8 (saves {gib(total // 2)}, less exact)")
    return ways
