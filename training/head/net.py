"""The EAGLE3 head in training: one layer over states of the target, whose own states are fed back.

Position i of the head takes the target's states at i (at ``boundaries``, the number of blocks before them)
and the token at i + 1, and predicts the token at i + 2. Each further step takes its own state of the step
before and the next token:

    s = fc(input_norm(states at the boundaries, joined))          # later: norm(x) of the step before
    r = hidden_norm(s)
    x = r + attention(embed_norm(embedding of the token), r)      # no biases, no sinks, plain RoPE
    x = x + down(silu(gate(mlp_norm(x))) * up(mlp_norm(x)))
    logits = norm(x) head                                         # over the draft vocabulary

The embedding is the target's. ``head`` is ``U map + corrections``: U the target's unembedding rows of the
draft vocabulary. Matrices pass through int8 rounding once ``quantise`` is set, as ``export.py`` packs them.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from chorale.model.config import RopeConfig
from chorale.model.rope import rope_table
from training.net import round_rows_int8

MATRICES = ("fc", "qkv", "output", "gate_up", "down")


@dataclass(frozen=True, slots=True)
class HeadShape:
    hidden_size: int = 256
    num_heads: int = 8
    num_kv_heads: int = 2
    head_dim: int = 64
    intermediate_size: int = 768
    boundaries: tuple[int, ...] = (1, 4, 6)
    rope_theta: float = 150000.0
    eps: float = 1e-5


class HeadNet(nn.Module):
    """``unembedding`` [Vd, H]: the target's rows of ``draft_ids`` [Vd]; the first ``num_corrections`` ids of
    ``corrected`` (columns of the draft vocabulary) get correction rows."""

    draft_ids: torch.Tensor
    unembedding: torch.Tensor
    corrected: torch.Tensor
    rope: torch.Tensor

    def __init__(
        self,
        shape: HeadShape,
        draft_ids: torch.Tensor,
        unembedding: torch.Tensor,
        corrected: torch.Tensor,
        max_len: int = 2048,
    ) -> None:
        super().__init__()
        self.shape, self.quantise, self.dtype = shape, False, torch.bfloat16
        hidden, inter, dim = shape.hidden_size, shape.intermediate_size, shape.head_dim
        self.register_buffer("draft_ids", draft_ids)
        self.register_buffer("unembedding", unembedding.float())
        self.register_buffer("corrected", corrected)
        rope = rope_table(RopeConfig(theta=shape.rope_theta, factor=1.0), dim, max_len)
        self.register_buffer("rope", rope, persistent=False)

        def matrix(rows: int, columns: int, scale: float = 1.0) -> nn.Parameter:
            return nn.Parameter(torch.randn(rows, columns) * columns**-0.5 * scale)

        def ones(size: int) -> nn.Parameter:
            return nn.Parameter(torch.ones(size))

        wide = hidden * len(shape.boundaries)
        self.input_norm, self.fc = ones(wide), matrix(hidden, wide)
        self.embed_norm, self.hidden_norm, self.mlp_norm, self.norm = (ones(hidden) for _ in range(4))
        self.qkv = matrix((shape.num_heads + 2 * shape.num_kv_heads) * dim, 2 * hidden)
        self.output = matrix(hidden, shape.num_heads * dim, 0.3)
        self.gate_up, self.down = matrix(2 * inter, hidden), matrix(hidden, inter, 0.3)
        self.map = nn.Parameter(torch.eye(hidden))
        self.corrections = nn.Parameter(torch.zeros(len(corrected), hidden))

    def matrices(self) -> Matrices:
        """The matrices of one forward pass, rounded and cast once."""

        def made(weight: torch.Tensor) -> torch.Tensor:
            return (round_rows_int8(weight) if self.quantise else weight).to(self.dtype)

        rounded = {name: made(getattr(self, name)) for name in MATRICES}
        return Matrices(**rounded, head=self.head().to(self.dtype))

    def head(self) -> torch.Tensor:
        """Returns [Vd, H] float32."""
        rows = round_rows_int8(self.corrections) if self.quantise else self.corrections
        mapped = self.unembedding.to(self.dtype) @ self.map.to(self.dtype)
        return mapped.float().index_add(0, self.corrected, rows)

    def normed(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x.float(), (x.shape[-1],), weight, self.shape.eps).to(self.dtype)

    def logits(self, x: torch.Tensor, matrices: Matrices) -> torch.Tensor:
        """[..., H], the sum before the final norm -> [..., Vd] float32."""
        return F.linear(self.normed(x, self.norm), matrices.head).float()


@dataclass(frozen=True, slots=True)
class Matrices:
    fc: torch.Tensor
    qkv: torch.Tensor
    output: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    head: torch.Tensor


@dataclass(frozen=True, slots=True)
class Sources:
    """The head's input: B packed rows of S tokens, each with several documents."""

    states: torch.Tensor  # [B, S, boundaries * H], the target's
    embedded: torch.Tensor  # [B, S, H], the token after each position
    positions: torch.Tensor  # [B, S]; 0 begins a document


class Chain:
    """Drafts from many positions at once: ``anchors`` [B, A] into the rows of ``sources``.

    ``x`` [B, A, H] is the sum before the final norm of the last step. An anchor sees the keys of the target's
    states up to itself, and those of its own steps.
    """

    def __init__(self, net: HeadNet, matrices: Matrices, sources: Sources, anchors: torch.Tensor) -> None:
        self.net, self.matrices = net, matrices
        self._rows = torch.arange(len(anchors), device=anchors.device).unsqueeze(1)
        self._at = sources.positions[self._rows, anchors]  # [B, A], the anchors' positions; the step is added
        states = F.linear(net.normed(sources.states, net.input_norm), matrices.fc)
        residual, joined = self._inputs(states, sources.embedded)
        first = net.shape.num_heads * net.shape.head_dim
        key_values = F.linear(joined, matrices.qkv[first:])
        self._k, self._v = self._split(key_values, sources.positions)  # [B, S, Nkv, D]
        documents = (sources.positions == 0).cumsum(1)
        index = torch.arange(documents.shape[1], device=anchors.device)
        same = documents[self._rows, anchors].unsqueeze(2) == documents.unsqueeze(1)
        self._mask = same & (index <= anchors.unsqueeze(2))  # [B, A, S]
        self._own: list[
            tuple[torch.Tensor, torch.Tensor]
        ] = []  # k, v [B, A, Nkv, D] of steps after the first
        residual, joined = residual[self._rows, anchors], joined[self._rows, anchors]
        self.x = self._block(residual, self._query(joined))

    def advance(self, embedded: torch.Tensor) -> torch.Tensor:
        """Takes another step. ``embedded`` [B, A, H]: the token after those that the anchors have seen."""
        net = self.net
        self._at = self._at + 1
        residual, joined = self._inputs(net.normed(self.x, net.norm), embedded)
        first = net.shape.num_heads * net.shape.head_dim
        self._own.append(self._split(F.linear(joined, self.matrices.qkv[first:]), self._at))
        self.x = self._block(residual, self._query(joined))
        return self.x

    def _inputs(self, states: torch.Tensor, embedded: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        net = self.net
        residual = net.normed(states, net.hidden_norm)
        return residual, torch.cat((net.normed(embedded, net.embed_norm), residual), dim=-1)

    def _split(self, key_values: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        k, v = key_values.unflatten(-1, (2, -1, self.net.shape.head_dim)).unbind(-3)
        return self._rotate(k, positions), v

    def _query(self, joined: torch.Tensor) -> torch.Tensor:
        shape = self.net.shape
        q = F.linear(joined, self.matrices.qkv[: shape.num_heads * shape.head_dim])
        return self._rotate(q.unflatten(-1, (-1, shape.head_dim)), self._at)

    def _rotate(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Rotates [B, A, N, D]; pairs are (i, i + D/2)."""
        cos, sin = self.net.rope[positions].unsqueeze(-2).chunk(2, dim=-1)
        first, second = x.float().chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)

    def _block(self, residual: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        net, matrices = self.net, self.matrices
        x = residual.float() + F.linear(self._attend(q), matrices.output).float()
        gate, up = F.linear(net.normed(x, net.mlp_norm), matrices.gate_up).chunk(2, dim=-1)
        return x + F.linear(F.silu(gate) * up, matrices.down).float()

    def _attend(self, q: torch.Tensor) -> torch.Tensor:
        """q [B, A, Nq, D] -> [B, A, Nq * D]."""
        groups = self.net.shape.num_kv_heads
        q = q.unflatten(2, (groups, -1)).permute(0, 2, 3, 1, 4)  # [B, Nkv, rep, A, D]
        k, v = (t.transpose(1, 2).unsqueeze(2) for t in (self._k, self._v))  # [B, Nkv, 1, S, D]
        scores = (q @ k.mT).float().masked_fill(~self._mask[:, None, None], float("-inf"))
        own = [(k.transpose(1, 2).unsqueeze(2), v.transpose(1, 2).unsqueeze(2)) for k, v in self._own]
        drawn = [(q * k).sum(-1, keepdim=True).float() for k, _ in own]  # [B, Nkv, rep, A, 1]
        weights = torch.softmax(torch.cat((scores, *drawn), -1) * q.shape[-1] ** -0.5, dim=-1).to(q.dtype)
        length = self._k.shape[1]
        out = weights[..., :length] @ v
        for position, (_, value) in enumerate(own):
            out = out + weights[..., length + position].unsqueeze(-1) * value
        return out.permute(0, 3, 1, 2, 4).flatten(2)


@torch.no_grad()
def write_start(net: HeadNet, scales: torch.Tensor, norm: torch.Tensor) -> None:
    """Initialises two attention heads for copying: they look for earlier states of the current token and pass
    on the token that followed. ``scales`` [boundaries]: sizes of the target's states;
    ``norm``: its final norm.
    """
    shape = net.shape
    hidden, dim, half = shape.hidden_size, shape.head_dim, shape.head_dim // 2
    net.input_norm.copy_((scales.square().mean().sqrt() / scales).repeat_interleave(hidden))
    net.norm.copy_(norm)
    net.fc.mul_(0.3)
    for block in (0, len(shape.boundaries) - 1):
        net.fc[:, block * hidden : (block + 1) * hidden] += torch.eye(hidden) * 0.7
    slow = torch.cat((torch.arange(dim // 4, half), torch.arange(dim // 4 + half, dim)))
    basis = torch.linalg.qr(torch.randn(hidden, hidden))[0]
    size = (12.0 * dim**0.5 / (half * 0.6)) ** 0.5
    at = list(itertools.accumulate((shape.num_heads, shape.num_kv_heads), initial=0))
    for group in range(shape.num_kv_heads):
        q_head = group * (shape.num_heads // shape.num_kv_heads)
        query, key, value = (
            net.qkv[(first + head) * dim : (first + head + 1) * dim]
            for first, head in zip((at[0], at[1], at[2]), (q_head, group, group), strict=True)
        )
        match = basis[group * half : (group + 1) * half] * size
        query.mul_(0.1)[slow, :hidden] = match
        key.mul_(0.1)[slow, hidden:] = match
        passed = basis[-(group + 1) * dim :][:dim]
        value.zero_()[:, :hidden] = passed
        net.output[:, q_head * dim : (q_head + 1) * dim] = passed.mT
