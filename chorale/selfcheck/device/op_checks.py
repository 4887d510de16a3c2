"""The ops that the engine would use against plain float32 arithmetic, in every layer of this checkpoint.

Each op gets the exact inputs of its layer, so errors do not add up, and a wrong one is named with its layer.
The forms are those of an engine's steps: a prompt, the end of a prompt, and decoding rows of several counts,
for which back ends have different kernels. Experts are chosen twice: as the router would, and evenly, so that
each one is used.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from chorale.kernels.ops import Ops
from chorale.model.gpt_oss import GptOss, LayerWeights, Weights
from chorale.model.weights import packed_layers
from chorale.selfcheck.check import Found
from chorale.selfcheck.device.errors import BFLOAT16_EXPERTS, E4M3_CACHE, E4M3_EXPERTS, ErrorTable, limit_of
from chorale.selfcheck.device.machine import Machine
from chorale.selfcheck.device.plain import Attended, PlainModel, attend, choose, experts, rms_norm, rotations
from chorale.selfcheck.device.plain_weights import PlainLayer
from chorale.selfcheck.device.steps import PagedSequence, Step

_TOKENS, _FEW_TOKENS = 384, 160  # above the window, so that it matters
_ROWS, _FEW_ROWS = (1, 2, 8, 17, 64), (1, 6)
_HEAD_ROWS = (1, 8, 64)
_TIE = 1e-3  # of router logits: which of two such experts is chosen is left to rounding


def check_ops(machine: Machine) -> Found:
    """Raises ``Failed`` naming the ops, layers and steps that are wrong."""
    table = ErrorTable()
    with torch.inference_mode():
        checker = _Checker(machine, table)
        checker.rope()
        x = checker.embed()
        for number, (plain, packed) in enumerate(zip(machine.plain.layers(), _packed(machine), strict=True)):
            x = checker.layer(number, plain, packed, x)
        checker.head(x)
    table.check()
    worst = max(table.worst.values(), key=lambda each: each.error / each.limit)
    detail = (
        f"{machine.model.num_hidden_layers} layers, {len(table.worst)} results of {machine.ops.name} ops, "
        f"each within its limit; nearest to it: {worst.error:.2g} of {worst.limit:g} at {worst.where}"
    )
    return Found(detail, table.facts)


def _packed(machine: Machine) -> Iterator[LayerWeights]:
    return packed_layers(
        machine.folder,
        machine.model,
        machine.ops,
        device=machine.device,
        dtype=machine.dtype,
        fp8_activations=machine.fp8_activations,
    )


@dataclass(frozen=True, slots=True)
class _Exact:
    """The results of plain arithmetic for all tokens of the sequence in one layer."""

    x: torch.Tensor  # [T, H], into the layer
    half: Attended
    k: torch.Tensor  # [T, Nkv, D], as the cache's type holds it
    v: torch.Tensor
    attended: torch.Tensor  # [T, Nq * D], from q, k and v as the ops get them
    normed: torch.Tensor  # [T, H], into the experts
    ids: torch.Tensor  # [2 T, K]: the router's choice of each token, then an even one
    gates: torch.Tensor  # [2 T, K]
    mixed: torch.Tensor  # [2 T, H]: what the experts add


class _Checker:
    def __init__(self, machine: Machine, table: ErrorTable) -> None:
        self._machine, self._table = machine, table
        self._ops: Ops = machine.ops
        self._config = config = machine.model
        few = machine.is_slow or machine.quick
        length = min(_FEW_TOKENS if few else _TOKENS, machine.max_model_len)
        generator = torch.Generator().manual_seed(1)
        self._ids = torch.randint(0, min(199_000, config.vocab_size), (length,), generator=generator)
        self._sequence = PagedSequence(length, machine.block_size, machine.device)
        self._steps = self._make_steps(length, _FEW_ROWS if few else _ROWS)
        self._plain = PlainModel(config, [length], machine.device)
        source = machine.plain
        self._embedding = source.read(None, "embedding")
        self._norm = source.read(None, "final_norm").float()
        weights = Weights(self._embedding, (), self._norm, None, 0)
        model = GptOss(config, weights, self._ops, length)  # for its rotary table and attention's sizes
        self._rope, self._shape = model.rope, model.shape
        self._kv = self._sequence.pool(config.num_key_value_heads, config.head_dim, machine.kv_dtype)
        self._stream_dtype = torch.float32
        self._limit = limit_of(machine.dtype)
        is_e4m3 = machine.kv_dtype == torch.float8_e4m3fn
        self._kv_limit = E4M3_CACHE if is_e4m3 else max(self._limit, limit_of(machine.kv_dtype))
        self._expert_limit = self._limit if machine.dtype == torch.float32 else BFLOAT16_EXPERTS
        if machine.fp8_activations:
            self._expert_limit = E4M3_EXPERTS

    def _make_steps(self, length: int, rows: tuple[int, ...]) -> list[Step]:
        sequence, window = self._sequence, self._config.sliding_window
        edges = [length - 1, window - 1, window, 0, window + 1, 1, length // 2]
        places = [place for place in dict.fromkeys(edges) if 0 <= place < length]
        places += [place for place in range(length) if place not in places]
        steps = [sequence.decodes(sorted(places[:count])) for count in rows if count <= length]
        return [sequence.prompt(), sequence.prompt(length // 3), *steps]

    def rope(self) -> None:
        """The rotary table at positions up to the longest sequence's last."""
        config, longest = self._config, self._machine.max_model_len
        table = GptOss(config, Weights(torch.empty(0), (), self._norm, None, 0), self._ops, longest).rope
        places = torch.unique(torch.linspace(0, longest - 1, 4096).long())
        exact = torch.cat(rotations(config.rope, config.head_dim, places), -1).squeeze(1)
        self._table.add("rotary table", "any layer", table[places], exact, 1e-5)

    def embed(self) -> torch.Tensor:
        ids = self._ids.to(self._machine.device)
        exact, found = self._embedding[ids].float(), self._ops.embed(self._embedding, ids)
        self._stream_dtype = found.dtype
        self._table.add("embed", "the embedding", found, exact, 1e-6)
        return exact

    def layer(self, number: int, plain: PlainLayer, packed: LayerWeights, x: torch.Tensor) -> torch.Tensor:
        """Checks the ops of one layer; returns the exact x after it."""
        kind = "window" if self._plain.window(number) is not None else "full"
        exact, group = self._exact(number, plain, x), self._config.kv_tensor_of(number)[0]
        for step in self._steps:
            where = f"layer {number} ({kind}), {step.name}"
            self._attention(where, step, group, packed, exact)
            self._router(where, step, plain, packed, exact)
            self._experts(where, step, packed, exact)
        return exact.half.x + exact.mixed[: len(x)]

    def _exact(self, number: int, plain: PlainLayer, x: torch.Tensor) -> _Exact:
        config, rounding = self._config, self._machine.rounding
        half = self._plain.attention(number, plain, x)
        k, v, q = rounding.cached(half.k), rounding.cached(half.v), rounding.product(half.q)
        attended = attend(q, k, v, plain.sinks, self._plain.window(number))
        normed = rms_norm(half.x, plain.expert_norm, config.rms_norm_eps)
        ids, gates = choose(normed, plain, config.num_experts_per_tok)
        even = _even_choice(len(x), config.num_local_experts, config.num_experts_per_tok, number)
        ids = torch.cat((ids, even.to(ids.device)))
        gates = torch.cat((gates, gates.flip(0)))
        mixed = experts(torch.cat((normed, normed)), ids, gates, plain, config)
        return _Exact(x, half, k, v, attended, normed, ids, gates, mixed)

    def _attention(self, where: str, step: Step, group: int, packed: LayerWeights, exact: _Exact) -> None:
        ops, table, sequence, some = self._ops, self._table, self._sequence, step.tokens
        plan = ops.plan_attention(step.meta, self._shape, self._machine.block_size)
        x, rope = self._stream(exact.x[some]), self._rope[some]
        q = ops.qkv_rope_cache(x, None, packed.qkv, self._config.rms_norm_eps, rope, plan, group, self._kv)
        table.add("qkv_rope_cache: q", where, q, exact.half.q[some], self._limit)
        k, v = sequence.read(self._kv, group, some)
        table.add("qkv_rope_cache: k", where, k, exact.half.k[some], self._kv_limit)
        table.add("qkv_rope_cache: v", where, v, exact.half.v[some], self._kv_limit)
        sequence.write(self._kv, group, exact.k, exact.v)
        attended = ops.attention(exact.half.q[some].to(q.dtype), self._kv, packed.sinks, plan, group)
        table.add("attention", where, attended, exact.attended[some], self._limit)

    def _router(self, where: str, step: Step, plain: PlainLayer, packed: LayerWeights, exact: _Exact) -> None:
        table, some, eps = self._table, step.tokens, self._config.rms_norm_eps
        attended = exact.half.attended[some].to(self._machine.dtype)
        x = self._stream(exact.x[some])
        found, normed, ids, gates = self._ops.project_and_route(
            attended, packed.output, x, packed.router, eps
        )
        added = found.float() - exact.x[some]
        table.add("project_and_route: x", where, added, exact.half.x[some] - exact.x[some], self._limit)
        own = rms_norm(found.float(), plain.expert_norm, eps)
        table.add("project_and_route: norm", where, normed, own, self._limit)
        logits = own @ plain.router_weight.t() + plain.router_bias
        least = logits.topk(ids.shape[1], -1).values[:, -1:]
        chosen = logits.gather(1, ids)
        short = float((least - chosen).clamp(min=0).max())  # 0: the best ones were chosen
        twice = float((ids.sort(-1).values.diff(dim=-1) == 0).any())
        tie = _TIE * max(1.0, float(logits.abs().max()))
        table.note("project_and_route: choice", where, max(short, twice * tie * 2), tie)
        table.add("project_and_route: gates", where, gates, torch.softmax(chosen, -1), 5 * _TIE)

    def _experts(self, where: str, step: Step, packed: LayerWeights, exact: _Exact) -> None:
        total = len(exact.x)
        for what, rows in (("", step.tokens), (", experts chosen evenly", step.tokens + total)):
            some, x = rows % total, self._stream(exact.half.x[step.tokens])
            normed = exact.normed[some].to(self._machine.dtype)
            ids, gates = exact.ids[rows], exact.gates[rows]
            eps = self._config.rms_norm_eps
            found, ahead = self._ops.moe(normed, ids, gates, packed.experts, x, packed.qkv, eps)
            added = found.float() - exact.half.x[some]
            self._table.add("moe", where + what, added, exact.mixed[rows], self._expert_limit)
            if ahead is not None:
                own = rms_norm(found.float(), packed.qkv.norm, eps)
                self._table.add("moe: norm", where + what, ahead, own, self._limit)

    def head(self, x: torch.Tensor) -> None:
        head, machine = machine_head(self._machine), self._machine
        packed, eps = self._ops.pack_head(head.to(machine.dtype)), self._config.rms_norm_eps
        for rows in _HEAD_ROWS[: 2 if machine.is_slow else None]:
            index = torch.arange(rows, device=x.device) * (len(x) // rows)
            found = self._ops.lm_head(self._stream(x), index, self._norm, packed, eps)
            normed = rms_norm(x[index], self._norm, eps)
            exact = torch.cat([normed @ part.float().t() for part in head.split(8192)], 1)
            self._table.add("lm_head", f"the output, {rows} rows", found, exact, self._limit)

    def _stream(self, x: torch.Tensor) -> torch.Tensor:
        """A copy of x, which ops may overwrite, in their type of the residual stream."""
        return x.to(self._stream_dtype, copy=True)


def machine_head(machine: Machine) -> torch.Tensor:
    return machine.plain.read(None, "head")


def _even_choice(tokens: int, num_experts: int, top_k: int, seed: int) -> torch.Tensor:
    """[tokens, K]: every expert equally often, in a random order."""
    generator = torch.Generator().manual_seed(seed)
    whole = num_experts - num_experts % top_k
    rounds = -(-tokens * top_k // whole)
    orders = [torch.randperm(num_experts, generator=generator)[:whole] for _ in range(rounds)]
    return torch.cat(orders)[: tokens * top_k].view(tokens, top_k)
