"""gpt-oss once more, in plain float32 torch: what the engine's results are compared with.

Written from the model's definition, apart from ``model/gpt_oss.py`` and ``kernels/``, so that it shares no
error with them: no blocks, no packing, no batches. Only the configuration and the reader of files are shared.
``Rounding`` makes the same model with the roundings of an engine in bfloat16: the difference between the two
is what rounding alone does to this checkpoint.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from chorale.model.config import ModelConfig, RopeConfig
from chorale.selfcheck.device.plain_weights import PlainLayer

_MAX_SCORES = 2**28  # elements of one score tensor: 1 GiB
_MAX_SCORES_CPU = 2**23
_PIECE = 4096  # keys


@dataclass(frozen=True, slots=True)
class Rounding:
    """Types to which an engine rounds. None: not at all."""

    products: torch.dtype | None = None  # inputs and results of matrix products
    kv: torch.dtype | None = None  # keys and values
    experts: torch.dtype | None = None  # inputs of the experts' products; None: as ``products``

    def product(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.products is None else x.to(self.products).float()

    def cached(self, x: torch.Tensor) -> torch.Tensor:
        if self.kv is None:
            return x
        limit = torch.finfo(self.kv).max
        return self.product(x).clamp(-limit, limit).to(self.kv).float()

    def expert_input(self, x: torch.Tensor) -> torch.Tensor:
        x = self.product(x)
        if self.experts is None:
            return x
        scale = x.abs().amax(-1, keepdim=True).clamp(min=1e-12) / torch.finfo(self.experts).max
        return (x / scale).to(self.experts).float() * scale


EXACT = Rounding()


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def frequencies(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """[D / 2] float32, radians a position: YaRN as gpt-oss was trained with it, in float32."""
    powers = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    fast = 1.0 / rope.theta**powers
    if rope.factor <= 1.0:
        return fast
    ends = [
        head_dim / 2 * math.log(rope.original_max_position / (beta * 2 * math.pi)) / math.log(rope.theta)
        for beta in (rope.beta_fast, rope.beta_slow)
    ]
    if rope.truncate:
        ends = [math.floor(ends[0]), math.ceil(ends[1])]
    low, high = max(ends[0], 0.0), min(ends[1], head_dim - 1.0)
    share = (torch.arange(head_dim // 2, dtype=torch.float32) - low) / max(high - low, 1e-3)
    share = share.clamp(0.0, 1.0)
    return fast * (1.0 - share) + fast / rope.factor * share


def rotations(rope: RopeConfig, head_dim: int, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(cosines, sines) of positions [T], each [T, 1, D / 2], times the concentration."""
    angles = positions.float().unsqueeze(1) * frequencies(rope, head_dim).to(positions.device)
    gain = 1.0 if rope.factor <= 1.0 else 1.0 + math.log(rope.factor) / 10
    gain = gain if rope.attention_factor is None else rope.attention_factor
    return (angles.cos() * gain).unsqueeze(1), (angles.sin() * gain).unsqueeze(1)


def rotate(x: torch.Tensor, turn: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """x [T, heads, D]: dimension i turns with i + D / 2."""
    half, (cos, sin) = x.shape[-1] // 2, turn
    left, right = x[..., :half], x[..., half:]
    return torch.cat((left * cos - right * sin, right * cos + left * sin), -1)


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor, window: int | None
) -> torch.Tensor:
    """One sequence from its first token: q [T, Nq, D], k and v [T, Nkv, D], sinks [Nq] -> [T, Nq * D]."""
    length, heads, dim = q.shape
    each = heads // k.shape[1]
    most = _MAX_SCORES if q.is_cuda else _MAX_SCORES_CPU
    seen = length if window is None else min(length, 2 * window)
    chunk = max(1, min(seen, most // (each * seen)))
    k, v = (torch.cat((x, x.new_zeros(_PIECE, *x.shape[1:]))) for x in (k, v))
    out = torch.empty_like(q)
    for head in range(k.shape[1]):
        group = slice(head * each, (head + 1) * each)
        for begin in range(0, length, chunk):
            end = min(begin + chunk, length)
            first = 0 if window is None else max(0, begin - window + 1)
            keys = end - first
            query = q[begin:end, group].reshape(-1, dim) / math.sqrt(dim)
            columns = slice(first, first + _whole_pieces(keys + 1))
            scores = (query @ k[columns, head].t()).view(end - begin, each, -1)
            masked = begin if window is None else first  # every query of the chunk sees all keys before it
            place = torch.arange(begin, end, device=q.device).unsqueeze(1)
            key = torch.arange(masked, columns.stop, device=q.device)
            unseen = key > place
            if window is not None:
                unseen |= place - key >= window
            scores[..., masked - first :].masked_fill_(unseen.unsqueeze(1), -math.inf)
            scores[..., keys] = sinks[group]  # takes its share and has no value
            shares = torch.softmax(scores, -1)
            shares[..., keys] = 0
            result = _product_of_pieces(shares.view(query.shape[0], -1), v[columns, head])
            out[begin:end, group] = result.view(end - begin, each, dim)
    return out.reshape(length, heads * dim)


def _whole_pieces(keys: int) -> int:
    """At least as many keys: whole pieces, or whole blocks of 64 within one."""
    unit = _PIECE if keys > _PIECE else 64
    return -(-keys // unit) * unit


def _product_of_pieces(shares: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """[R, K] times [K, D]. A GPU computes the pieces of K concurrently; R and D alone would not fill it."""
    piece = min(_PIECE, len(values))
    parts = shares.view(len(shares), -1, piece).transpose(0, 1)
    return torch.bmm(parts, values.reshape(-1, piece, values.shape[-1])).sum(0)


def choose(normed: torch.Tensor, layer: PlainLayer, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(expert ids [T, K], gates [T, K])."""
    logits = normed @ layer.router_weight.t() + layer.router_bias
    best = logits.topk(top_k, dim=-1)
    return best.indices, torch.softmax(best.values, -1)


def experts(
    normed: torch.Tensor,
    ids: torch.Tensor,
    gates: torch.Tensor,
    layer: PlainLayer,
    config: ModelConfig,
    rounding: Rounding = EXACT,
) -> torch.Tensor:
    """The sum over each token's experts, [T, H]."""
    out = torch.zeros_like(normed)
    inputs = rounding.expert_input(normed)
    for expert in ids.unique().tolist():
        token, place = (ids == expert).nonzero(as_tuple=True)
        up, down = layer.expert(expert)
        both = rounding.product(inputs[token] @ up.weight.t() + up.bias)
        gate, linear = both[:, 0::2], both[:, 1::2]
        gate = gate.clamp(max=config.swiglu_limit)
        linear = linear.clamp(-config.swiglu_limit, config.swiglu_limit)
        inner = gate * torch.sigmoid(config.swiglu_alpha * gate) * (linear + 1)
        result = rounding.product(rounding.expert_input(inner) @ down.weight.t() + down.bias)
        out.index_add_(0, token, result * gates[token, place].unsqueeze(1))
    return out


@dataclass(frozen=True, slots=True)
class Attended:
    """The first half of a layer. Shapes as in ``kernels/ops.py``."""

    q: torch.Tensor  # [T, Nq, D], rotated
    k: torch.Tensor  # [T, Nkv, D], rotated
    v: torch.Tensor
    attended: torch.Tensor  # [T, Nq * D]
    x: torch.Tensor  # [T, H], with the output projection added


class PlainModel:
    """The layers, as functions of their weights and of sequences that lie one after the other."""

    def __init__(self, config: ModelConfig, lengths: list[int], device: torch.device) -> None:
        self.config, self.lengths = config, lengths
        positions = torch.cat([torch.arange(length) for length in lengths]).to(device)
        self._turn = rotations(config.rope, config.head_dim, positions)

    def window(self, layer: int) -> int | None:
        return self.config.sliding_window if self.config.layer_types[layer].startswith("sliding") else None

    def attention(
        self, number: int, layer: PlainLayer, x: torch.Tensor, rounding: Rounding = EXACT
    ) -> Attended:
        config, total = self.config, x.shape[0]
        normed = rounding.product(rms_norm(x, layer.attention_norm, config.rms_norm_eps))
        qkv = rounding.product(normed @ layer.qkv_weight.t() + layer.qkv_bias)
        qkv = qkv.view(total, -1, config.head_dim)
        cut = config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads
        q, k, v = qkv.split(cut, 1)
        q, k = rounding.product(rotate(q, self._turn)), rounding.cached(rotate(k, self._turn))
        v = rounding.cached(v)
        pieces = zip(*(each.split(self.lengths) for each in (q, k, v)), strict=True)
        window = self.window(number)
        attended = torch.cat([attend(a, b, c, layer.sinks, window) for a, b, c in pieces])
        product = rounding.product(attended) @ layer.output_weight.t() + layer.output_bias
        return Attended(q, k, v, attended, x + rounding.product(product))

    def mix(self, layer: PlainLayer, x: torch.Tensor, rounding: Rounding = EXACT) -> torch.Tensor:
        """The second half: x with the experts' sum added."""
        normed = rms_norm(x, layer.expert_norm, self.config.rms_norm_eps)
        ids, gates = choose(normed, layer, self.config.num_experts_per_tok)
        return x + experts(normed, ids, gates, layer, self.config, rounding)


@dataclass(frozen=True, slots=True)
class Group:
    """Sequences that run together: the embedded tokens of each, and the roundings to run them with."""

    embedded: list[torch.Tensor]
    roundings: tuple[Rounding, ...]


class TooSlow(Exception):
    """The layers would take longer than the time that was given."""


def run_plain(
    config: ModelConfig, layers: Iterable[PlainLayer], group: Group, *, seconds: float = math.inf
) -> list[torch.Tensor]:
    """Returns x [T, H] after the last layer for each rounding. Every layer is read once.

    Raises ``TooSlow`` as soon as it is clear that all layers would take longer than ``seconds``.
    """
    device = group.embedded[0].device
    model = PlainModel(config, [len(each) for each in group.embedded], device)
    streams = [torch.cat(group.embedded) for _ in group.roundings]
    began = time.monotonic()
    for number, layer in enumerate(layers):
        for place, rounding in enumerate(group.roundings):
            half = model.attention(number, layer, streams[place], rounding).x
            streams[place] = model.mix(layer, half, rounding)
        if number % 2 and seconds < math.inf:  # a layer of each kind of attention
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            if (time.monotonic() - began) / (number + 1) * config.num_hidden_layers > seconds:
                raise TooSlow
    return streams
