"""Memory arithmetic: the sizes of weights, activations, exchanges and KV blocks.

Torch-free, so that ``chorale fit`` can answer before anything is downloaded. All sizes are bytes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from chorale.config.cache_dtype import E4M3
from chorale.config.engine import EngineConfig
from chorale.kernels.adapters import padded_rank
from chorale.model.config import MXFP4_GROUP, ModelConfig
from chorale.model.draft.config import MLP_TOKENS, HeadConfig, tensor_shapes

GIB = 2**30
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, E4M3: 1}
# Above this many parameters a CPU computes in bfloat16: float32 copies of the 20b's dense weights alone would
# take 7 GB on top of its experts.
SMALL_PARAMETERS = 500_000_000
LOGIT_ROWS = 256  # rows of logits at once, 206 MB; the head is no slower in pieces of this size
PROMPT_ROWS, LEAN_PROMPT_ROWS = 64, 16  # the same for log-probabilities of prompts
KEPT_ROWS = 64  # graphs of up to this many rows keep their logits; copying more would take too long
GRAPH_BYTES = 4 * 2**20  # one captured step without its tensors
LEFT_OUT = 192  # most unused columns in an expert's last tile (GroupedTile.most_left_out)
# Compiled kernels, libraries' workspaces, and fragmentation of the allocator's memory.
CUDA_RESERVE = 7 * GIB // 4
# The same for lean steps (``economy.py``): cuBLAS's workspaces, loaded kernels, and the unused ends of the
# allocator's segments. Measured on an H100 (``benchmarks.gpu.pool_fill --gib 15``).
LEAN_RESERVE = GIB // 4
# Buffers of NCCL (RCCL, HCCL) and its part of the context. A guess, not measured: they depend on version,
# channels and links.
NCCL_BYTES = 3 * GIB // 4
ONE_SHOT_ROWS = 2048  # upper bound of ranks times rows of one-shot calls (tuning.one_shot_rows)


@dataclass(frozen=True, slots=True)
class KvGeometry:
    """The blocks of one pool. A block serves either cache group; it has ``block_size`` tokens of all KV
    tensors."""

    block_size: int
    bytes_per_block: int
    sliding_window: int

    @property
    def window_blocks(self) -> int:
        """Maximum number of blocks that the window's tokens can touch."""
        return -(-(self.sliding_window - 1) // self.block_size) + 1

    def blocks_for(self, num_tokens: int) -> int:
        """Return the blocks of one sequence of ``num_tokens``: all tokens in the full group, the window in
        the other."""
        full = -(-num_tokens // self.block_size)
        return full + min(full, self.window_blocks)

    def tokens_in(self, num_blocks: int) -> int:
        """Return the longest sequence that ``num_blocks`` hold; the inverse of ``blocks_for``."""
        window = self.window_blocks
        full = num_blocks - window if num_blocks >= 2 * window else num_blocks // 2
        return max(full, 0) * self.block_size


def kv_geometry(model: ModelConfig, block_size: int, kv_dtype: str, head: int = 0) -> KvGeometry:
    """Return the geometry of the pool. ``head``: bytes of a draft head in each block."""
    token = 2 * model.num_key_value_heads * model.head_dim * DTYPE_BYTES[kv_dtype]  # K and V, one layer
    return KvGeometry(block_size, model.num_kv_tensors * block_size * token + head, model.sliding_window)


def weight_bytes(model: ModelConfig, dtype: str, *, decoded: bool = False, int8: bool = False) -> int:
    """Return the bytes of the weights: packed MXFP4 experts (4 bits, a scale byte per group), the rest
    ``dtype``.

    ``decoded``: experts are ``dtype`` too (``Hardware.decodes_experts``). ``int8``: dense weights except the
    embedding have 8 bits, and a 16-bit scale for each group. The reference back end decodes the experts of
    small models, which adds at most half a gigabyte.
    """
    experts = model.num_expert_parameters
    if model.dense_experts or decoded:
        return model.num_parameters * DTYPE_BYTES[dtype]
    embedding = model.vocab_size * model.hidden_size if int8 else 0
    dense = model.num_parameters - experts - embedding
    each = 1 + 2 / MXFP4_GROUP if int8 else DTYPE_BYTES[dtype]
    return experts // 2 + experts // MXFP4_GROUP + int(dense * each) + embedding * DTYPE_BYTES[dtype]


def compact_bytes(model: ModelConfig) -> int:
    """Return the bytes of the smaller copy of QKV, output projection and head: 12 bits per weight and a scale
    per row (``kernels/triton/dense/compact.py``)."""
    query, key = (n * model.head_dim for n in (model.num_attention_heads, model.num_key_value_heads))
    rows, hidden = query + 2 * key, model.hidden_size
    scales = model.num_hidden_layers * (rows + hidden) + model.vocab_size
    weights = model.num_hidden_layers * (rows + query) * hidden + model.vocab_size * hidden
    return weights * 3 // 2 + scales * 4


def slot_bytes(model: ModelConfig, rank: int, dtype: str) -> int:
    """Return the bytes of a GPU's slot for a LoRA adapter (``kernels/triton/lora/slots.py``): of all
    products, with biases, and of the head."""
    query, key = (n * model.head_dim for n in (model.num_attention_heads, model.num_key_value_heads))
    biases = query + 2 * key + model.hidden_size + model.num_local_experts
    rank = padded_rank(rank)
    head = rank * (model.hidden_size + model.vocab_size) + model.vocab_size
    own = (head + model.num_hidden_layers * biases) * DTYPE_BYTES[dtype]
    return adapter_bytes(model, rank, dtype) + own


def addend_bytes(model: ModelConfig, num_tokens: int, dtype: str) -> int:
    """Return the bytes of the tensor that adapters add to gate_up's output in a step."""
    return num_tokens * model.num_experts_per_tok * 2 * model.intermediate_size * DTYPE_BYTES[dtype]


def adapter_bytes(model: ModelConfig, rank: int, dtype: str, *, experts: bool = True) -> int:
    """Return the bytes of a LoRA adapter of attention and router in every layer, and of all experts."""
    hidden, inter = model.hidden_size, model.intermediate_size
    query, key = (n * model.head_dim for n in (model.num_attention_heads, model.num_key_value_heads))
    sizes = 5 * hidden + 2 * query + 2 * key + model.num_local_experts  # q, k, v, o, router
    if experts:
        sizes += model.num_local_experts * (hidden + 2 * inter + inter + hidden)
    return model.num_hidden_layers * rank * sizes * DTYPE_BYTES[dtype]


def head_bytes(head: HeadConfig, dtype: str) -> int:
    """Return the bytes of a draft head's weights per GPU, with an embedding of its own."""
    count = sum(math.prod(shape) for shape in tensor_shapes(head).values())
    return (count + head.context_width * head.hidden_size) * DTYPE_BYTES[dtype]


def head_kv_bytes(head: HeadConfig, block_size: int, kv_dtype: str) -> int:
    """Return the bytes of a draft head's keys and values per block of the pool, on each GPU."""
    return block_size * head.num_layers * head.kv_width * DTYPE_BYTES[kv_dtype]


def head_activation_bytes(head: HeadConfig, num_tokens: int, num_rows: int) -> int:
    """Return an upper estimate for one pass of a draft head: the target's and the layer's states per token,
    gate and up of some tokens, logits per row."""
    states = num_tokens * (2 * head.aux_width + 8 * head.hidden_size + head.context_width)
    num_rows = num_rows if head.kind == "eagle3" else max(num_rows, LOGIT_ROWS)
    inner = min(num_tokens, MLP_TOKENS) * 3 * head.intermediate_size
    return (states + inner + 2 * num_rows * head.draft_vocab_size) * 4


def token_bytes(model: ModelConfig, dtype: str, *, compact: bool = False) -> int:
    """Return the bytes of weights that one token reads: all except the embedding and unchosen experts.
    ``compact``: some have a copy of 12 bits instead of 16."""
    chosen = model.num_hidden_layers * model.num_experts_per_tok * 3 * model.hidden_size
    idle = model.num_expert_parameters - chosen * model.intermediate_size
    packed = DTYPE_BYTES[dtype] if model.dense_experts else 0.5 + 1 / MXFP4_GROUP
    embedding = model.vocab_size * model.hidden_size * DTYPE_BYTES[dtype]
    saved = compact_bytes(model) // 3 if compact else 0
    return weight_bytes(model, dtype) - int(idle * packed) - embedding - saved


def activation_bytes(model: ModelConfig, num_tokens: int, num_rows: int, dtype: str) -> int:
    """Return an upper estimate for one step: hidden states and expert work per token, logits and noise per
    row."""
    decoded = 3 * model.hidden_size * model.intermediate_size * DTYPE_BYTES[dtype]  # one expert, unpacked
    rows = min(num_rows, LOGIT_ROWS)
    # Unused columns of the last tiles, in two of the expert layer's tensors at a time.
    left_out = model.num_local_experts * LEFT_OUT * (model.hidden_size + model.intermediate_size) * 2
    return num_tokens * _token_bytes(model) + left_out + rows * model.vocab_size * 4 * 2 + 2 * decoded


def _token_bytes(model: ModelConfig) -> int:
    return (8 * model.hidden_size + 3 * model.num_experts_per_tok * model.intermediate_size) * 4


def lean_step_bytes(model: ModelConfig, num_tokens: int, num_rows: int) -> int:
    """Return the bytes of one step of a GPU with little memory: what the kernels allocate at most (rows of
    x, and SwiGLU's and down's results of each pair; ``tests/support/kernels/step_memory.py`` counts it), a
    third more for fragmentation, and the logits of ``num_rows`` rows, three times."""
    pairs, num_rows = model.num_experts_per_tok, max(num_rows, LEAN_PROMPT_ROWS)
    each = (model.hidden_size * 4 + model.intermediate_size * 2) * pairs + model.hidden_size * 4 * 4
    return num_tokens * each * 4 // 3 + min(num_rows, LOGIT_ROWS) * model.vocab_size * 4 * 3


def embedding_bytes(model: ModelConfig, dtype: str) -> int:
    """Return the bytes of the input embedding."""
    return model.vocab_size * model.hidden_size * DTYPE_BYTES[dtype]


def processor_bytes(model: ModelConfig, num_rows: int) -> int:
    """Return the bytes of the rows' logits processors: counts of output tokens, for penalties."""
    return num_rows * model.vocab_size * 4


def graph_bytes(model: ModelConfig, rows: int, num_graphs: int, max_blocks: int) -> int:
    """Returns the bytes of captured steps: the tensors of the largest (the pool is shared), tensors kept
    between steps (two block tables, logits or hidden states), and the graphs. ``rows``: tokens of the largest
    step; 0: no graphs."""
    if not rows:
        return 0
    tensors = rows * _token_bytes(model) + min(rows, LOGIT_ROWS) * model.vocab_size * 4
    kept = min(rows, KEPT_ROWS) * model.vocab_size * 4 + rows * (model.hidden_size * 4 + 2 * max_blocks * 4)
    return tensors + kept + num_graphs * GRAPH_BYTES


def rank_bytes(
    config: EngineConfig, model: ModelConfig, tokens: int, dtype: str, *, has_peers: bool = True
) -> int:
    """Returns the bytes that exchanges take on each of several GPUs. ``tokens``: tokens of the largest step.

    ``has_peers``: whether Chorale's all-reduce supports these GPUs.
    """
    if config.tensor_parallel_size == 1:
        return 0
    if has_peers and not config.disable_custom_all_reduce:
        return NCCL_BYTES + peer_bytes(model, tokens, dtype)
    return NCCL_BYTES + 2 * LOGIT_ROWS * model.vocab_size * 4  # gathered logits, by rank and as whole rows


def peer_bytes(model: ModelConfig, tokens: int, dtype: str) -> int:
    """Returns an upper bound of the memory that other ranks can write to, bytes.

    ``reduce.memory.Layout`` has the exact sizes: the words of one-shot and two-shot calls, the norm, the
    residual stream in float32, and flags.
    """
    width = DTYPE_BYTES[dtype]
    one_shot = 2 * ONE_SHOT_ROWS * model.hidden_size * 4
    return one_shot + (tokens + 8) * model.hidden_size * (2 * width + 4) + 2**20


def gib(num_bytes: int) -> str:
    """Format bytes for messages: "3.25 GiB", "12.0 MiB"."""
    if abs(num_bytes) >= GIB // 10:
        return f"{num_bytes / GIB:.2f} GiB"
    return f"{num_bytes / 2**20:.1f} MiB"
