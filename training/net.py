"""The trained parameters, and how they become the ``Weights`` of our model at each step.

Embedding and unembedding are ``R W + D``: R the fixed features of every token (``chorale.demo.features``), W
trained, D corrections for the tokens that the corpus uses most. Expert matrices pass through MXFP4 rounding
and D through int8 rounding once ``quantise`` is set, so that packing loses nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from chorale.kernels.ops import AttentionMeta, ForwardBatch, Ops, QkvWeights, RouterWeights
from chorale.model.config import ModelConfig
from chorale.model.gpt_oss import GptOss, LayerWeights, Weights
from training.ops import TRAINING_OPS, KeyValueHolder, TrainedExperts, _StraightThrough, lm_head, round_mxfp4


def round_rows_int8(rows: torch.Tensor) -> torch.Tensor:
    """[N, H] as int8 with one scale a row would hold them; differentiable."""
    with torch.no_grad():
        scale = rows.abs().amax(dim=-1, keepdim=True).clamp(min=1e-8) / 127
        rounded = torch.round(rows / scale) * scale
    return _StraightThrough.apply(rows, rounded)  # type: ignore[no-any-return]


class Layer(nn.Module):
    """One layer's parameters, float32; matrices as [out, in]."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        hidden, inter, dim = config.hidden_size, config.intermediate_size, config.head_dim
        heads = config.num_attention_heads + 2 * config.num_key_value_heads
        experts = config.num_local_experts
        depth = (2 * config.num_hidden_layers) ** -0.5

        def matrix(*shape: int, scale: float = 1.0) -> nn.Parameter:
            return nn.Parameter(torch.randn(*shape) * shape[-1] ** -0.5 * scale)

        def zeros(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.zeros(*shape))

        self.attention_norm = nn.Parameter(torch.ones(hidden))
        self.qkv, self.qkv_bias = matrix(heads * dim, hidden), zeros(heads * dim)
        self.output = matrix(hidden, config.num_attention_heads * dim, scale=depth)
        self.output_bias = zeros(hidden)
        self.sinks = zeros(config.num_attention_heads)
        self.mlp_norm = nn.Parameter(torch.ones(hidden))
        self.router, self.router_bias = matrix(experts, hidden, scale=0.5), zeros(experts)
        self.gate_up, self.gate_up_bias = matrix(experts, 2 * inter, hidden), zeros(experts, 2 * inter)
        self.down, self.down_bias = matrix(experts, hidden, inter, scale=depth), zeros(experts, hidden)


@dataclass(frozen=True, slots=True)
class Hidden:
    """Normed hidden states at the positions that carry loss, and the unembedding to score them with."""

    states: torch.Tensor  # [L, H]
    unembedding: torch.Tensor  # [V, H]


class DemoNet(nn.Module):
    """``features``: [V, F] float32; ``corrected``: ids of the tokens with a correction row."""

    def __init__(self, config: ModelConfig, features: torch.Tensor, corrected: torch.Tensor) -> None:
        super().__init__()
        self.config = config
        self.register_buffer("features", features.bfloat16())
        self.register_buffer("corrected", corrected)
        width, hidden = features.shape[1], config.hidden_size
        self.embed_w = nn.Parameter(torch.randn(width, hidden) * 0.8)
        self.unembed_w = nn.Parameter(torch.randn(width, hidden) * 0.02)
        self.embed_d = nn.Parameter(torch.zeros(len(corrected), hidden))
        self.unembed_d = nn.Parameter(torch.zeros(len(corrected), hidden))
        self.final_norm = nn.Parameter(torch.ones(hidden))
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.quantise = False

    def table(self, weight: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """[V, H] bf16: features @ weight, plus the corrections of the corrected tokens."""
        rows = round_rows_int8(rows) if self.quantise else rows
        base = self.features @ weight.bfloat16()
        return base.index_add(0, self.corrected, rows.to(base.dtype))

    def weights(self, unembedding: torch.Tensor) -> Weights:
        return Weights(
            embedding=self.table(self.embed_w, self.embed_d),
            layers=tuple(self._layer(layer) for layer in self.layers),
            final_norm=self.final_norm,
            head=unembedding,
            num_parameters=0,
        )

    def _layer(self, layer: Layer) -> LayerWeights:
        config, packed = self.config, round_mxfp4 if self.quantise else (lambda weight: weight)
        return LayerWeights(
            qkv=QkvWeights(layer.attention_norm, (layer.qkv, layer.qkv_bias)),
            sinks=layer.sinks,
            output=(layer.output, layer.output_bias),
            router=RouterWeights(
                layer.mlp_norm, (layer.router, layer.router_bias), config.num_experts_per_tok
            ),
            experts=TrainedExperts(
                packed(layer.gate_up),
                layer.gate_up_bias,
                packed(layer.down),
                layer.down_bias,
                config.swiglu_limit,
                config.swiglu_alpha,
            ),
        )

    def forward(self, token_ids: torch.Tensor, logits_index: torch.Tensor, ops: Ops = TRAINING_OPS) -> Hidden:
        """token_ids [B, S] int64, logits_index [L] into the flattened tokens."""
        num_sequences, seq_len = token_ids.shape
        device = token_ids.device
        unembedding = self.table(self.unembed_w, self.unembed_d)
        model = GptOss(self.config, self.weights(unembedding), ops, max_len=seq_len)
        empty = torch.empty(0, dtype=torch.int32, device=device)
        meta = AttentionMeta(
            positions=torch.arange(seq_len, device=device).repeat(num_sequences),
            query_start=empty,
            context_lens=empty,
            block_tables=(empty, empty),
            slots=(empty, empty),
            max_query_len=seq_len,
            max_context_len=seq_len,
        )
        batch = ForwardBatch(token_ids.flatten(), logits_index, meta)
        holders = [KeyValueHolder() for _ in range(self.config.num_kv_slots)]
        x = model.run(batch, holders)
        return Hidden(
            lm_head(x, logits_index, self.final_norm, unembedding, self.config.rms_norm_eps), unembedding
        )
