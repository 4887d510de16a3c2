"""The trained parameters, and how they become the ``Weights`` of our model at each step.

Embedding and unembedding are ``R W + D``: R the fixed features of every token
(``chorale.model.demo.features``), W trained, D corrections for the tokens that the corpus uses most. Expert
matrices pass through MXFP4 rounding and D through int8 rounding once ``quantise`` is set, so that packing
loses nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from chorale.kernels.ops import AttentionMeta, ForwardBatch, Ops, QkvWeights, RouterWeights
from chorale.model.config import ModelConfig
from chorale.model.gpt_oss import GptOss, LayerWeights, Weights, rope_table
from training.ops import TRAINING_OPS, KeyValueHolder, StraightThrough, TrainedExperts, round_mxfp4

Rounding = Callable[[torch.Tensor], torch.Tensor]


def round_rows_int8(rows: torch.Tensor) -> torch.Tensor:
    """Rounds [N, H] as int8 with a scale per row; differentiable."""
    with torch.no_grad():
        scale = rows.abs().amax(dim=-1, keepdim=True).clamp(min=1e-8) / 127
        rounded = torch.round(rows / scale) * scale
    return StraightThrough.apply(rows, rounded)  # type: ignore[no-any-return, no-untyped-call]


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
class Table:
    """Rows of ``features @ weight + corrections`` for given tokens; the embedding during training."""

    features: torch.Tensor  # [V, F] bfloat16
    weight: torch.Tensor  # [F, H]
    corrections: torch.Tensor  # [N, H]
    correction_of: torch.Tensor  # [V] int64: which correction a token has; N: none

    @property
    def device(self) -> torch.device:
        """Holds the rotary table of ``GptOss``; the net inserts its own, which is on the device already."""
        return torch.device("cpu")

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Embeds [...] int64 as [..., H] bfloat16."""
        base = F.embedding(token_ids, self.features) @ self.weight.bfloat16()
        padded = F.pad(self.corrections, (0, 0, 0, 1)).to(base.dtype)
        return base + F.embedding(self.correction_of[token_ids], padded)


class DemoNet(nn.Module):
    """``features``: [V, F] float32; ``corrected``: ids of the tokens with a correction row."""

    features: torch.Tensor
    corrected: torch.Tensor
    correction_of: torch.Tensor

    def __init__(self, config: ModelConfig, features: torch.Tensor, corrected: torch.Tensor) -> None:
        super().__init__()
        self.config = config
        self.register_buffer("features", features.bfloat16(), persistent=False)
        self.register_buffer("corrected", corrected)
        correction_of = torch.full((features.shape[0],), len(corrected))
        correction_of[corrected] = torch.arange(len(corrected))
        self.register_buffer("correction_of", correction_of, persistent=False)
        width, hidden = features.shape[1], config.hidden_size
        self.embed_w = nn.Parameter(torch.randn(width, hidden) * 0.8)
        # Equal at first, so that attention learns to copy by passing rows through unchanged.
        self.unembed_w = nn.Parameter(self.embed_w.detach() * 0.05)
        self.embed_d = nn.Parameter(torch.zeros(len(corrected), hidden))
        self.unembed_d = nn.Parameter(torch.zeros(len(corrected), hidden))
        self.final_norm = nn.Parameter(torch.ones(hidden))
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.quantise = False
        self._rope = torch.empty(0)
        self.round_experts: Rounding = round_mxfp4

    def rope(self, seq_len: int, device: torch.device) -> torch.Tensor:
        if self._rope.shape[0] != seq_len or self._rope.device != device:
            self._rope = rope_table(self.config.rope, self.config.head_dim, seq_len).to(device)
        return self._rope

    def table(self, side: str) -> Table:
        """``name``: "embed" or "unembed"."""
        rows = getattr(self, f"{side}_d")
        rows = round_rows_int8(rows) if self.quantise else rows
        return Table(self.features, getattr(self, f"{side}_w"), rows, self.correction_of)

    def weights(self) -> Weights:
        return Weights(
            embedding=self.table("embed"),  # type: ignore[arg-type]  # the type of TRAINING_OPS.embed
            layers=tuple(self._layer(layer) for layer in self.layers),  # type: ignore[arg-type]
            final_norm=self.final_norm,
            head=None,
            num_parameters=0,
        )

    def _layer(self, layer: Layer) -> LayerWeights:
        config = self.config
        packed: Rounding = self.round_experts if self.quantise else (lambda weight: weight)
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

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        logits_index: torch.Tensor,
        ops: Ops = TRAINING_OPS,
    ) -> torch.Tensor:
        """Returns normed hidden states [L, H] float32.

        token_ids and positions [B, S] int64 (position 0 begins a document), logits_index [L] into the
        flattened tokens.
        """
        seq_len = token_ids.shape[1]
        model = GptOss(self.config, self.weights(), ops, max_len=1)
        model.rope = self.rope(seq_len, token_ids.device)
        empty = torch.empty(0, dtype=torch.int32, device=token_ids.device)
        meta = AttentionMeta(
            positions=positions.flatten(),
            query_start=empty,
            context_lens=empty,
            block_tables=(empty, empty),
            slots=(empty, empty),
            max_query_len=seq_len,
            max_context_len=seq_len,
        )
        batch = ForwardBatch(token_ids.flatten(), logits_index, meta)
        holders = [KeyValueHolder() for _ in range(self.config.num_kv_tensors)]
        x = model.run(batch, holders)  # type: ignore[arg-type]  # the type of TRAINING_OPS
        return ops.lm_head(x, logits_index, self.final_norm, None, self.config.rms_norm_eps)
