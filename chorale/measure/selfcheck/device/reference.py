"""The engine's model on the reference ops, which computes the expected results of the device.

Each layer runs as a ``GptOss`` of one layer whose embedding is the hidden state before it. So the 120b needs
memory for one layer, packed as in the file, and for the hidden states.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from chorale.kernels import select_ops
from chorale.kernels.ops import ForwardBatch, Ops
from chorale.kernels.reference.moe import E4m3Inputs
from chorale.measure.selfcheck.device.machine import Machine
from chorale.measure.steps import PagedSequences
from chorale.model.gpt_oss import GptOss, LayerWeights, Weights

_BLOCK_SIZE = 16
_HEAD_ROWS = 16_384  # rows of the output matrix computed at once


class Reference:
    """The model in float32 or, if ``rounded``, in the number formats of the engine."""

    def __init__(self, machine: Machine, *, rounded: bool = False) -> None:
        self._machine, self._rounded = machine, rounded
        self._dtype = machine.dtype if rounded else torch.float32
        self._kv_dtype = machine.kv_dtype if rounded else torch.float32
        self.ops: Ops = select_ops("reference", str(machine.device))
        self.norm = machine.read("final_norm").float()

    def embedded(self, token_ids: Sequence[int]) -> torch.Tensor:
        table = self._machine.checkpoint.read(None, "embedding")
        return table[torch.tensor(token_ids)].float().to(self._machine.device)

    def one_layer(self, number: int, layer: LayerWeights, x: torch.Tensor, most: int, ops: Ops) -> GptOss:
        """Returns a layer as a model whose embedding is the hidden state ``x`` [T, H] before it."""
        one = self._machine.model.only(number)
        return GptOss(one, Weights(x, (layer,), self.norm, None, 0), ops, most)

    def run(self, sequences: Sequence[Sequence[int]], scale: float = 1.0) -> list[torch.Tensor]:
        """Returns [T, H] after the last layer for each sequence of token ids. ``scale``: factor of the
        embedding."""
        machine, lengths = self._machine, [len(ids) for ids in sequences]
        paged = PagedSequences(lengths, _BLOCK_SIZE, machine.device)
        kv, step = paged.pool(machine.model, self._kv_dtype), paged.whole()
        batch = ForwardBatch(step.tokens, step.tokens[:0], step.meta)
        x = self.embedded([token for ids in sequences for token in ids]) * scale
        for number, layer in enumerate(machine.layers(self.ops, self._dtype)):
            if self._rounded and machine.fp8_activations:
                layer = replace(layer, experts=E4m3Inputs(layer.experts))
            x = self.one_layer(number, layer, x, max(lengths), self.ops).hidden(batch, [kv])
        return [*x.split(lengths)]

    def logprobs(self, x: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
        """Returns [R, V] on the CPU. ``x``: [R, H] after the last layer. ``head``: the output matrix."""
        # All back ends but the reference sum logits in float32, whatever the weights' number format.
        dtype = self._dtype if self._machine.ops.name == "reference" else torch.float32
        rows = torch.arange(len(x), device=x.device)
        pieces = []
        for piece in head.split(_HEAD_ROWS):
            weights = Weights(x, (), self.norm, self.ops.pack_head(piece.to(dtype)), 0)
            pieces.append(GptOss(self._machine.model, weights, self.ops, 1).logits(x, rows))
        logits = torch.cat(pieces, 1)
        # In float64: a sum of 201,088 float32 numbers is off by 5e-5.
        return (logits - logits.double().logsumexp(-1, keepdim=True).float()).cpu()
