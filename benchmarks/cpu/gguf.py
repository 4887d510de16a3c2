"""Writes a gpt-oss checkpoint as a GGUF file for llama.cpp, to compare both engines.

    python -m benchmarks.cpu.gguf FOLDER FILE.gguf [--dense q8_0]

MXFP4 experts keep their values; router, norms, biases and sinks are float32, and ``--dense`` is
the type of all other matrices. The file has no tokenizer: only token ids can be given. Needs ``gguf``.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from chorale.model.checkpoint import Checkpoint
from chorale.model.config import ModelConfig

try:
    import gguf
except ImportError:
    raise SystemExit("writing GGUF files needs the package gguf: pip install gguf") from None

DENSE = ("q8_0", "bf16", "f16", "f32")
MODEL = {"embedding": "token_embd.weight", "head": "output.weight", "final_norm": "output_norm.weight"}
LAYER = {
    "attention_norm": "attn_norm.weight",
    "q.weight": "attn_q.weight",
    "q.bias": "attn_q.bias",
    "k.weight": "attn_k.weight",
    "k.bias": "attn_k.bias",
    "v.weight": "attn_v.weight",
    "v.bias": "attn_v.bias",
    "sinks": "attn_sinks.weight",
    "output.weight": "attn_output.weight",
    "output.bias": "attn_output.bias",
    "expert_norm": "post_attention_norm.weight",
    "router.weight": "ffn_gate_inp.weight",
    "router.bias": "ffn_gate_inp.bias",
    "down.bias": "ffn_down_exps.bias",
}


@dataclass(frozen=True)
class Tensor:
    name: str
    kind: gguf.GGMLQuantizationType
    shape: tuple[int, ...]  # elements of each axis
    data: Callable[[], Any]  # returns an array with bytes on its last axis


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("folder", type=Path)
    options.add_argument("file", type=Path)
    options.add_argument("--dense", default="q8_0", choices=DENSE)
    given = options.parse_args()
    write_gguf(given.folder, given.file, given.dense)


def write_gguf(folder: Path, file: Path, dense: str) -> None:
    """Writes one tensor after the other, so that only one is in memory."""
    config = ModelConfig.load(folder)
    checkpoint = Checkpoint(folder, config)
    if checkpoint.layout != "published":
        raise SystemExit(f"{folder}: only the published layout is converted, not {checkpoint.layout}")
    found = list(tensors(checkpoint, config, gguf.GGMLQuantizationType[dense.upper()]))
    writer = gguf.GGUFWriter(file, "gpt-oss")
    describe(writer, config)
    for tensor in found:
        packed = gguf.quant_shape_to_byte_shape(tensor.shape, tensor.kind)
        size = int(np.prod(packed))
        writer.add_tensor_info(tensor.name, packed, np.dtype(np.uint8), size, tensor.kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for tensor in found:
        writer.write_tensor_data(np.ascontiguousarray(tensor.data()))
    writer.close()


def describe(writer: gguf.GGUFWriter, config: ModelConfig) -> None:
    """Writes the metadata. The clamp and slope of SwiGLU and the order of layers are fixed in llama.cpp."""
    kinds = tuple("full_attention" if i % 2 else "sliding_attention" for i in range(config.num_hidden_layers))
    if (config.swiglu_limit, config.swiglu_alpha, config.layer_types) != (7.0, 1.702, kinds):
        raise SystemExit("llama.cpp supports one SwiGLU and one order of layers; this checkpoint has others")
    rope = config.rope
    writer.add_tokenizer_model("none")
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_expert_feed_forward_length(config.intermediate_size)
    writer.add_expert_count(config.num_local_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_sliding_window(config.sliding_window)
    writer.add_rope_freq_base(rope.theta)
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(rope.factor)
    writer.add_rope_scaling_orig_ctx_len(rope.original_max_position)
    writer.add_rope_scaling_yarn_beta_fast(rope.beta_fast)
    writer.add_rope_scaling_yarn_beta_slow(rope.beta_slow)


def tensors(
    checkpoint: Checkpoint, config: ModelConfig, dense: gguf.GGMLQuantizationType
) -> Iterator[Tensor]:
    for role, name in MODEL.items():
        yield floats(checkpoint, None, role, name, dense)
    for layer in range(config.num_hidden_layers):
        for role, name in LAYER.items():
            yield floats(checkpoint, layer, role, f"blk.{layer}.{name}", dense)
        for first, half in enumerate(("gate", "up")):  # their rows alternate in a checkpoint
            rows = slice(first, None, 2)
            name = f"blk.{layer}.ffn_{half}_exps"
            yield experts(checkpoint, layer, "gate_up", f"{name}.weight", rows)
            yield floats(checkpoint, layer, "gate_up.bias", f"{name}.bias", dense, rows)
        yield experts(checkpoint, layer, "down", f"blk.{layer}.ffn_down_exps.weight", slice(None))


def floats(
    checkpoint: Checkpoint,
    layer: int | None,
    role: str,
    name: str,
    dense: gguf.GGMLQuantizationType,
    columns: slice = slice(None),
) -> Tensor:
    is_dense = role in ("embedding", "head") or (role.endswith(".weight") and role != "router.weight")
    kind = dense if is_dense else gguf.GGMLQuantizationType.F32
    stored = checkpoint.read(layer, role)[..., columns]

    def data() -> Any:
        return gguf.quantize(stored.float().numpy(), kind).view(np.uint8)

    return Tensor(name, kind, tuple(stored.shape), data)


def experts(checkpoint: Checkpoint, layer: int, role: str, name: str, rows: slice) -> Tensor:
    blocks = checkpoint.read(layer, f"{role}.blocks")[:, rows]
    scales = checkpoint.read(layer, f"{role}.scales")[:, rows]
    shape = (*scales.shape[:-1], scales.shape[-1] * 32)
    return Tensor(name, gguf.GGMLQuantizationType.MXFP4, shape, lambda: mxfp4_blocks(blocks, scales).numpy())


def mxfp4_blocks(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """[..., G, 16] and [..., G] -> [..., G * 17]: the scale, then 16 bytes of the elements i and i + 16.

    In a checkpoint, a byte has two neighbours. In both forms, the low nibble has the first element.
    """
    codes = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(-2)  # [..., G, 32]
    return torch.cat((scales.unsqueeze(-1), codes[..., :16] | (codes[..., 16:] << 4)), dim=-1).flatten(-2)


if __name__ == "__main__":
    main()
