"""Memory arithmetic: the sizes of weights, activations and KV blocks, and of the KV pool.

Torch-free, so that ``chorale fit`` can answer before anything is downloaded. All sizes are bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

from chorale.config import EngineConfig
from chorale.engine.types import CacheGroup
from chorale.errors import ConfigError
from chorale.model.config import MXFP4_GROUP, ModelConfig
from chorale.runtime.cache_dtype import E4M3
from chorale.runtime.hardware import Hardware

GIB = 2**30
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, E4M3: 1}
# Above this many parameters a CPU computes in bfloat16: float32 copies of the 20b's dense weights alone would
# take 7 GB on top of its experts.
SMALL_PARAMETERS = 500_000_000
CPU_SHARE = 0.25  # of the memory left after the weights: a CPU host has other work
CPU_MOST = 16 * GIB
LOGIT_ROWS = 256  # rows of logits at once: 206 MB; the head is no slower in pieces of this size
KEPT_ROWS = 64  # graphs of up to this many rows keep their logits; copying more would take too long
GRAPH_BYTES = 4 * 2**20  # of one captured step beside its tensors
LEFT_OUT = 192  # most places without a pair in an expert's last tile (GroupedTile.most_left_out)
# Compiled kernels, libraries' workspaces, and fragmentation of the allocator's memory.
CUDA_RESERVE = 7 * GIB // 4
RANK_RESERVE = GIB  # NCCL's buffers; an estimate that has not been measured
CPU_TOKENS = 4096  # of every row; a CPU does not keep more sequences than that busy at length


@dataclass(frozen=True, slots=True)
class KvGeometry:
    """The blocks of one pool. A block serves either cache group: ``block_size`` tokens of all KV tensors."""

    block_size: int
    bytes_per_block: int
    sliding_window: int

    @property
    def window_blocks(self) -> int:
        """Most blocks that the window's tokens can touch."""
        return -(-(self.sliding_window - 1) // self.block_size) + 1

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that one sequence of ``num_tokens`` holds: all of the full group, the window of the
        other."""
        full = -(-num_tokens // self.block_size)
        return full + min(full, self.window_blocks)

    def tokens_in(self, num_blocks: int) -> int:
        """The longest sequence that ``num_blocks`` hold; the inverse of ``blocks_for``."""
        window = self.window_blocks
        full = num_blocks - window if num_blocks >= 2 * window else num_blocks // 2
        return max(full, 0) * self.block_size


def kv_geometry(model: ModelConfig, block_size: int, kv_dtype: str) -> KvGeometry:
    token = 2 * model.num_key_value_heads * model.head_dim * DTYPE_BYTES[kv_dtype]  # K and V, one layer
    return KvGeometry(block_size, model.num_kv_tensors * block_size * token, model.sliding_window)


def weight_bytes(model: ModelConfig, dtype: str) -> int:
    """MXFP4 experts stay packed (4 bits, and a scale byte for each group); the rest is ``dtype``.

    The CPU back end decodes the experts of small models, which adds half a gigabyte at most.
    """
    experts = model.num_expert_parameters
    if model.dense_experts:
        return model.num_parameters * DTYPE_BYTES[dtype]
    dense = model.num_parameters - experts
    return experts // 2 + experts // MXFP4_GROUP + dense * DTYPE_BYTES[dtype]


def token_bytes(model: ModelConfig, dtype: str) -> int:
    """Bytes of weights that one token of one sequence reads: all but the embedding and unchosen experts."""
    idle = model.num_expert_parameters * (1 - model.num_experts_per_tok / model.num_local_experts)
    packed = DTYPE_BYTES[dtype] if model.dense_experts else 0.5 + 1 / MXFP4_GROUP
    embedding = model.vocab_size * model.hidden_size * DTYPE_BYTES[dtype]
    return weight_bytes(model, dtype) - int(idle * packed) - embedding


def activation_bytes(model: ModelConfig, num_tokens: int, num_rows: int, dtype: str) -> int:
    """Upper estimate for one step: hidden states and expert work by token, logits and noise by row."""
    decoded = 3 * model.hidden_size * model.intermediate_size * DTYPE_BYTES[dtype]  # one expert, unpacked
    rows = min(num_rows, LOGIT_ROWS)
    # A tile's places without a pair, of two of the expert layer's tensors at once.
    left_out = model.num_local_experts * LEFT_OUT * (model.hidden_size + model.intermediate_size) * 2
    return num_tokens * _token_bytes(model) + left_out + rows * model.vocab_size * 4 * 2 + 2 * decoded


def _token_bytes(model: ModelConfig) -> int:
    return (8 * model.hidden_size + 3 * model.num_experts_per_tok * model.intermediate_size) * 4


def processor_bytes(model: ModelConfig, num_rows: int) -> int:
    """Bytes of the rows' logits processors: counts of output tokens, for penalties."""
    return num_rows * model.vocab_size * 4


def graph_bytes(model: ModelConfig, rows: int, num_graphs: int, max_blocks: int) -> int:
    """Returns the bytes of captured steps: the largest one's tensors (the pool is shared), those kept between
    steps (two block tables, logits or hidden states), and the graphs. ``rows``: tokens of the largest; 0: no
    graphs."""
    if not rows:
        return 0
    tensors = rows * _token_bytes(model) + min(rows, LOGIT_ROWS) * model.vocab_size * 4
    kept = min(rows, KEPT_ROWS) * model.vocab_size * 4 + rows * (model.hidden_size * 4 + 2 * max_blocks * 4)
    return tensors + kept + num_graphs * GRAPH_BYTES


@dataclass(frozen=True, slots=True)
class PoolSize:
    num_blocks: int
    reason: str


@dataclass(frozen=True, slots=True)
class PoolRequest:
    """Inputs of the pool's size. ``fixed``: bytes of weights and activations."""

    geometry: KvGeometry
    max_num_seqs: int
    max_model_len: int
    fixed: int

    def useful_blocks(self, num_tokens: int) -> int:
        """Blocks for every row at ``num_tokens``, and for one row at full length."""
        every = self.max_num_seqs * self.geometry.blocks_for(min(num_tokens, self.max_model_len))
        return max(every, self.geometry.blocks_for(self.max_model_len))


def size_pool(config: EngineConfig, hardware: Hardware, request: PoolRequest) -> PoolSize:
    """Returns the number of blocks: by the override, the requested bytes, or a share of the memory.

    Raises ``ConfigError`` for more than all of the memory.
    """
    per_block = request.geometry.bytes_per_block
    asked = _asked_size(config, per_block)
    if asked is not None:
        _check_memory(asked, per_block, hardware)
        return asked
    budget, reason = _budget(config, hardware, request.fixed)
    blocks = max(budget, 0) // per_block
    length = min(request.max_model_len, CPU_TOKENS if hardware.kind == "cpu" else request.max_model_len)
    useful = request.useful_blocks(length)
    if blocks > useful:
        return PoolSize(useful, f"room for {request.max_num_seqs} sequences of {length} tokens")
    return PoolSize(blocks, reason)


def _asked_size(config: EngineConfig, per_block: int) -> PoolSize | None:
    if config.num_gpu_blocks_override is not None:
        return PoolSize(config.num_gpu_blocks_override, "--num-gpu-blocks-override")
    if config.kv_cache_memory_bytes is not None:
        return PoolSize(config.kv_cache_memory_bytes // per_block, "--kv-cache-memory-bytes")
    return None


def _check_memory(size: PoolSize, per_block: int, hardware: Hardware) -> None:
    """All of it, not what is free: others may give theirs back, and an allocation that fails says so."""
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


def _budget(config: EngineConfig, hardware: Hardware, fixed: int) -> tuple[int, str]:
    room = hardware.free_bytes - fixed
    if hardware.kind == "cpu":
        share = min(int(room * CPU_SHARE), CPU_MOST)
        return share, f"{CPU_SHARE:.0%} of the {gib(room)} left beside the weights, at most {gib(CPU_MOST)}"
    used_by_others = hardware.total_bytes - hardware.free_bytes
    allowed = int(hardware.total_bytes * config.gpu_memory_utilization)
    return (
        allowed - used_by_others - fixed,
        f"{config.gpu_memory_utilization:.0%} of {gib(hardware.total_bytes)}, less weights and activations",
    )


def check_one_fits(
    config: EngineConfig, size: PoolSize, request: PoolRequest, kv_dtype: str, hardware: Hardware
) -> None:
    """Raises ``ConfigError`` with computed ways out if one sequence of ``max_model_len`` does not fit."""
    per_block = request.geometry.bytes_per_block
    needed = request.geometry.blocks_for(request.max_model_len)
    if size.num_blocks >= needed:
        return
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


def _ways_to_fit(
    config: EngineConfig, needed: int, per_block: int, kv_dtype: str, hardware: Hardware
) -> list[str]:
    """Ways to a pool of ``needed`` blocks, by what decided its size (see ``size_pool``)."""
    if config.num_gpu_blocks_override is not None:  # whatever the blocks' bytes are, and the memory's
        return [f"--num-gpu-blocks-override {needed}, or none"]
    total = needed * per_block
    ways = [f"--kv-cache-memory-bytes {total} (if that much is free)"]
    if hardware.kind == "cuda" and config.kv_cache_memory_bytes is None:
        ways.append("a larger --gpu-memory-utilization")
    if kv_dtype == "float32":
        ways.append(f"--kv-cache-dtype bfloat16 (saves {gib(total // 2)})")
    if kv_dtype == "bfloat16":
        ways.append(f"--kv-cache-dtype fp8 (saves {gib(total // 2)}, less exact)")
    return ways


def gib(num_bytes: int) -> str:
    """Format bytes for messages: "3.25 GiB", "12.0 MiB"."""
    if abs(num_bytes) >= GIB // 10:
        return f"{num_bytes / GIB:.2f} GiB"
    return f"{num_bytes / 2**20:.1f} MiB"
