"""The four layouts of a gpt-oss checkpoint, as one table: role, name in each layout, shape.

A role is our name of a parameter. Shapes use the letters of ``kernels/ops.py`` (``G`` and ``J`` are the MXFP4
groups of H and I). A layout lists the roles for which it has names; ``qkv`` is one tensor in the reference
layout and three elsewhere, experts are MXFP4 or dense. AMD's quantizer (quark) writes the published names,
but separate tensors for each expert: expert 3's part of a role is the role ``.../3``. There too, rows of
gate_up alternate gate and up, and the first of two weights is in the low nibble.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from chorale.model.config import MXFP4_GROUP, ModelConfig

Layout = Literal["published", "dense", "reference", "quark"]

FLOATS = frozenset({"BF16", "F16", "F32"})
BYTES = frozenset({"U8"})

# role, name in the published and the dense layout, name in the reference layout, shape
_MODEL_TABLE: tuple[tuple[str, str, str, str], ...] = (
    ("embedding", "model.embed_tokens.weight", "embedding.weight", "V H"),
    ("final_norm", "model.norm.weight", "norm.scale", "H"),
    ("head", "lm_head.weight", "unembedding.weight", "V H"),
)

# The same, for each layer. "-": the layout has no such tensor.
_LAYER_TABLE: tuple[tuple[str, str, str, str], ...] = (
    ("attention_norm", "input_layernorm.weight", "attn.norm.scale", "H"),
    ("qkv.weight", "-", "attn.qkv.weight", "QKV H"),
    ("qkv.bias", "-", "attn.qkv.bias", "QKV"),
    ("q.weight", "self_attn.q_proj.weight", "-", "Q H"),
    ("q.bias", "self_attn.q_proj.bias", "-", "Q"),
    ("k.weight", "self_attn.k_proj.weight", "-", "KV H"),
    ("k.bias", "self_attn.k_proj.bias", "-", "KV"),
    ("v.weight", "self_attn.v_proj.weight", "-", "KV H"),
    ("v.bias", "self_attn.v_proj.bias", "-", "KV"),
    ("sinks", "self_attn.sinks", "attn.sinks", "NQ"),
    ("output.weight", "self_attn.o_proj.weight", "attn.out.weight", "H Q"),
    ("output.bias", "self_attn.o_proj.bias", "attn.out.bias", "H"),
    ("expert_norm", "post_attention_layernorm.weight", "mlp.norm.scale", "H"),
    ("router.weight", "mlp.router.weight", "mlp.gate.weight", "E H"),
    ("router.bias", "mlp.router.bias", "mlp.gate.bias", "E"),
    ("gate_up.bias", "mlp.experts.gate_up_proj_bias", "mlp.mlp1_bias", "E 2I"),
    ("down.bias", "mlp.experts.down_proj_bias", "mlp.mlp2_bias", "E H"),
)

_MXFP4_TABLE: tuple[tuple[str, str, str, str], ...] = (
    ("gate_up.blocks", "mlp.experts.gate_up_proj_blocks", "mlp.mlp1_weight.blocks", "E 2I G 16"),
    ("gate_up.scales", "mlp.experts.gate_up_proj_scales", "mlp.mlp1_weight.scales", "E 2I G"),
    ("down.blocks", "mlp.experts.down_proj_blocks", "mlp.mlp2_weight.blocks", "E H J 16"),
    ("down.scales", "mlp.experts.down_proj_scales", "mlp.mlp2_weight.scales", "E H J"),
)

_DENSE_TABLE: tuple[tuple[str, str, str, str], ...] = (
    ("gate_up.dense", "mlp.experts.gate_up_proj", "-", "E H 2I"),
    ("down.dense", "mlp.experts.down_proj", "-", "E I H"),
)

# Scales of an e4m3 KV cache, each a number; a checkpoint may have them or not.
_KV_SCALES = (("k_scale", "self_attn.k_scale"), ("v_scale", "self_attn.v_scale"))

# The same, for each expert.
_QUARK_TABLE: tuple[tuple[str, str, str], ...] = (
    ("gate_up.blocks", "gate_up_proj.weight", "2I H/2"),
    ("gate_up.scales", "gate_up_proj.weight_scale", "2I G"),
    ("gate_up.bias", "gate_up_proj.bias", "2I"),
    ("gate_up.input_scale", "gate_up_proj.input_scale", ""),
    ("down.blocks", "down_proj.weight", "H I/2"),
    ("down.scales", "down_proj.weight_scale", "H J"),
    ("down.bias", "down_proj.bias", "H"),
    ("down.input_scale", "down_proj.input_scale", ""),
)

_LAYER_PREFIX: dict[Layout, str] = {
    "published": "model.layers.{}.",
    "dense": "model.layers.{}.",
    "reference": "block.{}.",
    "quark": "model.layers.{}.",
}


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor that a checkpoint of a layout must have. ``layer`` None: it belongs to the whole model."""

    layer: int | None
    role: str
    name: str
    shape: tuple[int, ...]
    dtypes: frozenset[str]
    letters: tuple[str, ...]  # letters of the shape

    @property
    def expert(self) -> int | None:
        """Number of the expert, if the layout has one tensor for each expert."""
        _, _, number = self.role.partition("/")
        return int(number) if number else None


def tensor_specs(config: ModelConfig, layout: Layout) -> Iterator[TensorSpec]:
    """Return every tensor of a checkpoint, layers in order, then the tensors of the whole model."""
    sizes = _sizes(config)
    for layer in range(config.num_hidden_layers):
        prefix = _LAYER_PREFIX[layout].format(layer)
        sizes["E"] = config.experts_in(layer)
        for role, name, shape in _layer_rows(config, layout):
            yield _spec(layer, role, prefix + name, shape, sizes)
    for row in _MODEL_TABLE:
        yield _spec(None, row[0], row[2 if layout == "reference" else 1], row[3], sizes)


def kv_scale_specs(config: ModelConfig) -> Iterator[TensorSpec]:
    """Return the scales of an e4m3 KV cache that checkpoints of gpt_oss_puzzle may have."""
    for layer in range(len(config.layer_experts)):
        prefix = _LAYER_PREFIX["published"].format(layer)
        for role, name in _KV_SCALES:
            yield _spec(layer, role, prefix + name, "", {})


def _layer_rows(config: ModelConfig, layout: Layout) -> Iterator[tuple[str, str, str]]:
    """Return (role, name after the layer's prefix, shape) of one layer's tensors."""
    column = 2 if layout == "reference" else 1
    experts = {"dense": _DENSE_TABLE, "quark": ()}.get(layout, _MXFP4_TABLE)
    single = {row[0] for row in _QUARK_TABLE} if layout == "quark" else set()
    for row in _LAYER_TABLE + experts:
        if row[column] != "-" and row[0] not in single:
            yield row[0], row[column], row[3]
    for expert in range(config.num_local_experts if layout == "quark" else 0):
        for role, name, shape in _QUARK_TABLE:
            yield f"{role}/{expert}", f"mlp.experts.{expert}.{name}", shape


def _spec(layer: int | None, role: str, name: str, letters: str, sizes: dict[str, int]) -> TensorSpec:
    shape = tuple(sizes[letter] for letter in letters.split())
    packed = role.partition("/")[0].endswith((".blocks", ".scales"))
    return TensorSpec(layer, role, name, shape, BYTES if packed else FLOATS, tuple(letters.split()))


def detect_layout(names: Iterable[str]) -> Layout | None:
    """Detect the layout from the names of the expert tensors. Returns None if they are unknown."""
    markers: tuple[tuple[Layout, str], ...] = (
        ("published", _MXFP4_TABLE[0][1]),
        ("reference", _MXFP4_TABLE[0][2]),
        ("dense", _DENSE_TABLE[0][1]),
        ("quark", f"mlp.experts.0.{_QUARK_TABLE[0][1]}"),
    )
    names = list(names)
    for layout, marker in markers:
        if any(name.endswith(marker) for name in names):
            return layout
    return None


def _sizes(config: ModelConfig) -> dict[str, int]:
    query, key_value = (
        heads * config.head_dim for heads in (config.num_attention_heads, config.num_key_value_heads)
    )
    hidden, inter = config.hidden_size, config.intermediate_size
    return {
        "V": config.vocab_size,
        "H": hidden,
        "I": inter,
        "2I": 2 * inter,
        "E": config.num_local_experts,
        "G": hidden // MXFP4_GROUP,
        "J": inter // MXFP4_GROUP,
        "H/2": hidden // 2,
        "I/2": inter // 2,
        "NQ": config.num_attention_heads,
        "Q": query,
        "KV": key_value,
        "QKV": query + 2 * key_value,
        "16": MXFP4_GROUP // 2,
    }
