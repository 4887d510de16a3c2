"""HeadConfig: the sizes and switches of one draft head. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from chorale.model.config import ModelConfig, RopeConfig

MLP_TOKENS = 2048  # tokens at once: gate and up of 8,192 tokens would take 850 MB in a published head

# eagle3: one layer, one pass for each draft token. peagle: the same with more layers, and all tokens in one
# pass, with masks in place of unknown inputs. dflash: a block of masks attends to itself in both directions
# and to keys and values of the target's states.
Kind = Literal["eagle3", "peagle", "dflash"]
MOST_LAYERS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama3Rope:
    """Llama 3's scaling: slow pairs are slowed by ``factor``, fast pairs are unchanged, with a ramp in
    between."""

    theta: float
    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadConfig:
    """Sizes are counts of elements.

    The head reads the target's residual stream after ``aux_boundaries`` blocks (0: the embedding; all blocks:
    the sum before the final norm), states of ``target_hidden_size`` each. Without boundaries it reads the
    target's final, normed state.
    """

    hidden_size: int
    target_hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int  # the target's vocabulary
    draft_vocab_size: int
    aux_boundaries: tuple[int, ...]
    rope: RopeConfig | Llama3Rope
    kind: Kind = "eagle3"
    num_layers: int = 1
    mask_token: int = 0  # id of the masks' embedding; not of eagle3
    most_drafts: int | None = None  # draft tokens in the longest block; None: no limit
    rms_norm_eps: float = 1e-5
    norm_before_residual: bool = False  # the residual stream starts with the normed state
    norm_before_fc: bool = False  # one norm over all aux states
    aux_norms: bool = False  # a norm for each aux state
    norm_output: bool = False  # the next draft step takes the normed sum, not the sum
    max_position_embeddings: int = 4096  # longest context of the head's training
    aux_source: str = ""  # how the boundaries were found, for a log line

    @property
    def has_fc(self) -> bool:
        """Returns whether a product maps the target's states to the head's state."""
        return bool(self.aux_boundaries) or self.target_hidden_size != self.hidden_size

    @property
    def aux_width(self) -> int:
        """Width of the input of ``DraftHead.project``."""
        return max(len(self.aux_boundaries), 1) * self.target_hidden_size

    @property
    def kv_width(self) -> int:
        """Number of keys and values of a token in one layer."""
        return 2 * self.num_key_value_heads * self.head_dim

    @property
    def context_width(self) -> int:
        """Number of keys and values that DFlash computes from one token's states."""
        return self.num_layers * self.kv_width if self.kind == "dflash" else 0

    @property
    def aux_norm_names(self) -> tuple[str, ...]:
        """Names of the norms of the aux states: one over all, one for each, or none."""
        if self.aux_norms:
            return tuple(f"fc_norm.{n}.weight" for n in range(len(self.aux_boundaries)))
        return ("input_norm.weight",) if self.norm_before_fc else ()

    @property
    def state_norm(self) -> str:
        """Name of the norm of the head's state."""
        return "hidden_norm.weight" if self.kind == "dflash" else "layers.0.hidden_norm.weight"


def tensor_shapes(config: HeadConfig) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all tensors except biases, by their names in the format of speculators. The target
    may have embedding and head."""
    hidden = config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens.weight": (config.vocab_size, hidden)}
    shapes[config.state_norm] = (hidden,)
    for layer in range(config.num_layers):
        shapes |= _layer_shapes(config, layer)
    shapes |= {"norm.weight": (hidden,), "lm_head.weight": (config.draft_vocab_size, hidden)}
    if config.kind == "peagle":
        shapes["mask_hidden"] = (config.aux_width,)
    if config.has_fc:
        shapes["fc.weight"] = (hidden, config.aux_width)
    norms = config.aux_norm_names
    return shapes | {name: (config.aux_width // len(norms),) for name in norms}


def _layer_shapes(config: HeadConfig, layer: int) -> dict[str, tuple[int, ...]]:
    hidden, dim, inter = config.hidden_size, config.head_dim, config.intermediate_size
    queries, keys = config.num_attention_heads * dim, config.num_key_value_heads * dim
    width = hidden if config.kind == "dflash" or layer else 2 * hidden  # an embedding and a state
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm": (hidden,),
        "self_attn.q_proj": (queries, width),
        "self_attn.k_proj": (keys, width),
        "self_attn.v_proj": (keys, width),
        "self_attn.o_proj": (hidden, queries),
        "post_attention_layernorm": (hidden,),
        "mlp.gate_proj": (inter, hidden),
        "mlp.up_proj": (inter, hidden),
        "mlp.down_proj": (hidden, inter),
    }
    if config.kind == "dflash":
        shapes |= {"self_attn.q_norm": (dim,), "self_attn.k_norm": (dim,)}
    return {f"layers.{layer}.{name}.weight": shape for name, shape in shapes.items()}


def default_boundaries(num_layers: int) -> tuple[int, ...]:
    """Return the boundaries of heads whose configuration has none: low, middle and high, as in EAGLE3's
    code."""
    return min(2, num_layers), num_layers // 2, max(num_layers - 3, 0)


def published_head(target: ModelConfig, kind: Kind = "eagle3") -> HeadConfig:
    """Returns a head with the sizes of published heads, for benchmarks without weights. P-EAGLE's and
    DFlash's intermediate sizes, and DFlash's 8 layers, are derived from the published number of parameters
    (1.7 and 0.78 billion)."""
    hidden = target.hidden_size
    if kind == "peagle":
        return small_head(target, kind, num_layers=4, intermediate_size=4 * hidden)
    if kind == "dflash":
        layers = target.num_hidden_layers  # 20b: the outputs of layers 1, 6, 11, 16, 21
        read = tuple(sorted({min(2 + n * (layers - 4) // 4, layers) for n in range(5)}))
        return small_head(target, kind, num_layers=8, intermediate_size=8 * hidden // 3, aux_boundaries=read)
    draft = min(32_000, target.vocab_size)
    return small_head(target, intermediate_size=6 * hidden, draft_vocab_size=draft, norm_before_fc=True)


def small_head(target: ModelConfig, kind: Kind = "eagle3", **changes: object) -> HeadConfig:
    """Returns a head for a target of any size, for tests and benchmarks."""
    layers = target.num_hidden_layers
    is_parallel = kind != "eagle3"
    sizes: dict[str, object] = {
        "kind": kind,
        "num_layers": 2 if is_parallel else 1,
        "mask_token": target.vocab_size - 1 if is_parallel else 0,
        "hidden_size": target.hidden_size,
        "target_hidden_size": target.hidden_size,
        "num_attention_heads": target.num_attention_heads,
        "num_key_value_heads": target.num_key_value_heads,
        "head_dim": target.head_dim,
        "intermediate_size": target.intermediate_size,
        "vocab_size": target.vocab_size,
        "draft_vocab_size": target.vocab_size if is_parallel else target.vocab_size // 2,
        "aux_boundaries": default_boundaries(layers) if layers > 6 else (0, layers // 2, layers),
        "rope": RopeConfig(theta=10000.0, factor=1.0),
    }
    return HeadConfig(**(sizes | changes))  # type: ignore[arg-type]
