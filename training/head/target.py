"""The demo checkpoint as the target of a head: its states at every boundary of its blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

from chorale.harmony.vocab import VOCAB_SIZE
from chorale.kernels.ops import AttentionMeta, ForwardBatch, Ops
from chorale.model.gpt_oss import GptOss
from training.net import DemoNet
from training.ops import TRAINING_OPS, KeyValueHolder, rms_norm


class Target:
    """The weights, expanded once. Runs packed rows as the trainer of the demo does."""

    @torch.no_grad()
    def __init__(self, net: DemoNet, ops: Ops = TRAINING_OPS) -> None:
        device, self.config = net.final_norm.device, net.config
        tokens = torch.arange(VOCAB_SIZE, device=device)
        self.embedding, self.unembedding = net.table("embed")(tokens), net.table("unembed")(tokens)
        self.final_norm = net.final_norm.detach()
        self._seen: list[torch.Tensor] = []
        ops = replace(
            ops, embed=lambda table, ids: F.embedding(ids, table).float(), qkv_rope_cache=self._tap(ops)
        )
        self.model = GptOss(net.config, replace(net.weights(), embedding=self.embedding), ops, max_len=1)
        self.net = net

    def _tap(self, ops: Ops) -> Any:
        def qkv_rope_cache(x: torch.Tensor, *rest: Any) -> torch.Tensor:
            self._seen.append(x)
            return ops.qkv_rope_cache(x, *rest)

        return qkv_rope_cache

    @torch.no_grad()
    def states(self, token_ids: torch.Tensor, positions: torch.Tensor) -> list[torch.Tensor]:
        """Returns [B, S, H] float32 before the first block, after it, ..., after the last. Inputs: [B, S]."""
        seq_len = token_ids.shape[1]
        self.model.rope = self.net.rope(seq_len, token_ids.device)
        empty = torch.empty(0, dtype=torch.int32, device=token_ids.device)
        tables = (empty, empty)
        meta = AttentionMeta(positions.flatten(), empty, empty, tables, tables, seq_len, seq_len)
        holders = [KeyValueHolder() for _ in range(self.config.num_kv_tensors)]
        self._seen.clear()
        last = self.model.run(ForwardBatch(token_ids.flatten(), empty, meta), holders)  # type: ignore[arg-type]
        made = [x.unflatten(0, token_ids.shape) for x in (*self._seen, last)]
        self._seen.clear()
        return made

    def final(self, last: torch.Tensor) -> torch.Tensor:
        """Returns the last of the states, normed for the unembedding, bfloat16."""
        return rms_norm(last, self.final_norm, self.config.rms_norm_eps).bfloat16()


def joined(states: Sequence[torch.Tensor], boundaries: Sequence[int]) -> torch.Tensor:
    """Returns [B, S, boundaries * H]."""
    return torch.cat([states[boundary] for boundary in boundaries], dim=-1)
