"""Compares the ops that the engine would use with the reference ops in float32, in every layer.

The engine's model runs one layer at a time on ``_Pair``, which computes each op with both and continues with
the reference's result. So errors do not add up, and a wrong op is reported with its layer. The steps are a
prompt, the end of a prompt, and several numbers of decoding rows, for which back ends have different kernels.
Expert ops run with the router's choice and with an even one, so that each expert is used. Norms also run on
rows whose squares are as small as their epsilon, and attention on a long context.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from chorale.kernels.ops import AttentionShape, ForwardBatch, LayerCache, Ops, Routed
from chorale.kernels.reference.ops import rms_norm
from chorale.measure.selfcheck.check import Failed, Found
from chorale.measure.selfcheck.device.machine import Machine
from chorale.measure.selfcheck.device.reference import Reference
from chorale.measure.steps import PagedSequences

_TOKENS, _FEW_TOKENS = 384, 160  # more than the window, so that it matters
_ROWS, _FEW_ROWS = (1, 2, 8, 17, 64), (1, 6)
_HEAD_ROWS = (1, 8, 64)
_LONG = (8192, 131_072)
_TIE = 1e-3  # router logits closer than this: rounding may decide which expert is chosen
_SMALL = ", small inputs"
# Limits of the norm of a row's error, relative to the row's norm. In float32, only the order of sums differs.
# In bfloat16, a product of 2,880 terms is off by some 0.004, and a window one token too short by 0.09.
_LIMITS = {torch.float32: 1e-4, torch.bfloat16: 0.02, torch.float16: 0.02, torch.float8_e4m3fn: 0.06}
_BFLOAT16_EXPERTS = 0.04  # two products, then a sum in which experts may cancel out
_INT8 = 0.03  # inputs and weights have one scale per block of 32
_E4M3_EXPERTS = 0.1  # inputs of both products of an expert are e4m3


def check_kernels(machine: Machine) -> Found:
    """Raises ``Failed`` naming the ops, layers and steps that are wrong."""
    with torch.inference_mode():
        errors = _run(machine)
    worst = {op: max(found, key=lambda each: each.error) for op, found in errors.items()}
    facts = {op: each._asdict() for op, each in worst.items()}
    wrong = []
    for op, (error, limit, where) in worst.items():
        # A layer with several wrong steps is one place.
        if bad := {each.where.split(", ")[0] for each in errors[op] if not each.error <= each.limit}:
            wrong.append(f"{op} is off by {error:.2g} (limit {limit:g}) at {where}, in {len(bad)} places")
    if wrong:
        raise Failed("; ".join(wrong), facts)
    nearest = max(worst.values(), key=lambda each: each.error / each.limit)
    detail = (
        f"{machine.model.num_hidden_layers} layers, {len(worst)} results of {machine.ops.name} ops, each"
        f" within its limit; closest: {nearest.error:.2g} of {nearest.limit:g} at {nearest.where}"
    )
    return Found(detail, facts)


class _Error(NamedTuple):
    """The error of one result. ``where``: the layer and step in which it occurred."""

    error: float
    limit: float
    where: str


class _Pair:
    """Ops that compare the engine's results with the reference's and return the reference's.

    ``where``: the current layer and step, for messages. Packed weights and plans are (engine, reference).
    """

    def __init__(self, machine: Machine, exact: Ops, exact_kv: torch.Tensor) -> None:
        self.errors: dict[str, list[_Error]] = {}
        self.where = ""
        self._own, self._exact, self._exact_kv = machine.ops, exact, exact_kv
        self._dtype, self.num_experts = machine.dtype, machine.model.num_local_experts
        self._limit = _LIMITS[machine.dtype]
        self._product_limit = _INT8 if machine.int8 else self._limit
        self._kv_limit = max(self._product_limit, _LIMITS[machine.kv_dtype])
        is_coarse = machine.int8 or machine.dtype != torch.float32
        self._expert_limit = _BFLOAT16_EXPERTS if is_coarse else self._limit
        if machine.fp8_activations:
            self._expert_limit = _E4M3_EXPERTS
        self.ops = replace(
            machine.ops,
            plan_attention=lambda meta, *given: (*self._both("plan_attention", meta, *given), meta.slots),
            embed=exact.embed,
            qkv_rope_cache=self._qkv,
            attention=self._attention,
            project_and_route=self._route,
            moe=self._moe,
            pack_linear=self._pack_linear,
            pack_router=lambda *given: self._both("pack_router", *given),
            pack_experts=self._pack_experts,
        )

    def compare(
        self, op: str, found: torch.Tensor, exact: torch.Tensor, limit: float, what: str = ""
    ) -> None:
        found, exact = found.float().flatten(1), exact.float().flatten(1)
        norms = exact.norm(dim=1)
        floor = 0.05 * norms.square().mean().sqrt()  # for rows that happen to be nearly zero
        errors = (found - exact).norm(dim=1) / norms.maximum(floor).clamp(min=1e-30)
        self._note(op, float(errors.nan_to_num(math.inf, math.inf).max()), limit, what)

    def _note(self, op: str, error: float, limit: float, what: str = "") -> None:
        self.errors.setdefault(op, []).append(_Error(error, limit, self.where + what))

    def _both(self, name: str, *given: Any) -> tuple[Any, Any]:
        return getattr(self._own, name)(*given), getattr(self._exact, name)(*given)

    def _pack_linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Any:
        exact = self._exact.pack_linear(weight.float(), None if bias is None else bias.float())
        return self._own.pack_linear(weight, bias), exact

    def _pack_experts(self, tensors: Any) -> Any:
        exact = replace(tensors, dtype=torch.float32, fp8_activations=False)
        return self._own.pack_experts(tensors), self._exact.pack_experts(exact)

    def _qkv(self, x: Any, _: Any, weights: Any, eps: float, cache: LayerCache) -> Any:
        own, exact = (replace(weights, linear=linear) for linear in weights.linear)
        plans, kv = cache.plan, cache.kv
        ours, theirs = cache._replace(plan=plans[0]), cache._replace(plan=plans[1], kv=self._exact_kv)
        self._following = own
        for what, given in ((_SMALL, small(x, eps)), ("", x)):
            q = self._own.qkv_rope_cache(given.clone(), None, own, eps, ours)
            right = self._exact.qkv_rope_cache(given, None, exact, eps, theirs)
            self.compare("qkv_rope_cache: q", q, right, self._product_limit, what)
            pools = (_read(pool, plans[2][cache.group]) for pool in (kv, self._exact_kv))
            for name, found, written in zip("kv", *pools, strict=True):
                self.compare(f"qkv_rope_cache: {name}", found, written, self._kv_limit, what)
        most = torch.finfo(kv.dtype).max
        kv.copy_(self._exact_kv.to(self._dtype).clamp(-most, most))
        return right.to(q.dtype)

    def _attention(self, q: Any, sinks: Any, cache: LayerCache) -> torch.Tensor:
        ours, theirs = (cache._replace(plan=plan) for plan in cache.plan[:2])
        found = self._own.attention(q.clone(), sinks, ours)
        exact = self._exact.attention(q.float(), sinks, theirs)
        self.compare("attention", found, exact, self._limit)
        return exact.to(self._dtype)

    def _route(self, attended: Any, linear: Any, x: Any, weights: Any, eps: float) -> Any:
        own, exact = (replace(weights, linear=each) for each in weights.linear)
        # With zeros as input, the op adds only the bias, and the result has small rows.
        nothing = torch.zeros_like(attended)
        rows = small(x, eps) - linear[1](nothing.float())
        for what, given, added in ((_SMALL, rows, nothing), ("", x, attended)):
            found, routed = self._own.project_and_route(added, linear[0], given.clone(), own, eps)
            right = rms_norm(found, weights.norm, eps)
            self.compare("project_and_route: norm", routed.normed, right, self._limit, what)
        self.compare("project_and_route: x", found - x, linear[1](attended.float()), self._product_limit)
        logits, ids = exact.linear(right), routed.expert_ids
        chosen = logits.gather(1, ids)
        # 0 if the experts with the largest logits were chosen, each once.
        short = float((logits.topk(weights.top_k, -1).values[:, -1:] - chosen).clamp(min=0).max())
        if ids.shape[1] != weights.top_k or bool((ids.sort(-1).values.diff(dim=-1) == 0).any()):
            short = math.inf
        self._note("project_and_route: choice", short, _TIE * max(1.0, float(logits.abs().max())))
        self.compare("project_and_route: gates", routed.gates, torch.softmax(chosen, -1), 5 * _TIE)
        return self._exact.project_and_route(attended.float(), linear[1], x, exact, eps)

    def _moe(self, routed: Routed, experts: Any, x: Any, _: Any, eps: float) -> Any:
        normed, ids, gates = routed
        following, even = self._following, _even_choice(ids, self.num_experts)
        for what, chosen, some, given in (
            (_SMALL, ids, torch.zeros_like(gates), small(x, eps)),
            (", experts chosen evenly", even, gates, x),
            ("", ids, gates, x),
        ):
            own = Routed(normed.to(self._dtype), chosen, some)
            theirs = own._replace(normed=own.normed.float())
            exact, _ = self._exact.moe(theirs, experts[1], torch.zeros_like(x), None, eps)
            found, ahead = self._own.moe(own, experts[0], given.clone(), following, eps)
            if what != _SMALL:
                self.compare("moe", found - x, exact, self._expert_limit, what)
            if ahead is not None:
                self.compare("moe: norm", ahead, rms_norm(found, following.norm, eps), self._limit, what)
        return x + exact, None

    def head(self, machine: Machine, norm: torch.Tensor, x: torch.Tensor) -> None:
        head, eps = machine.read("head"), machine.model.rms_norm_eps
        packed = self._own.pack_head(head.to(machine.dtype))
        for rows in _HEAD_ROWS[: 2 if machine.plan.is_slow else None]:
            index = torch.arange(rows, device=x.device) * (len(x) // rows)
            for what, given in (("", x), (_SMALL, small(x, eps))):
                found = self._own.lm_head(given.clone(), index, norm, packed, eps)
                normed = rms_norm(given[index], norm, eps)
                exact = torch.cat([normed @ piece.float().t() for piece in head.split(8192)], 1)
                self.compare("lm_head", found, exact, self._product_limit, what)


def _run(machine: Machine) -> dict[str, list[_Error]]:
    config, reference = machine.model, Reference(machine)
    few = machine.plan.few
    length = min(_FEW_TOKENS if few else _TOKENS, machine.max_model_len)
    sequence = PagedSequences([length], machine.block_size, machine.device)
    kv, exact_kv = (sequence.pool(config, dtype) for dtype in (machine.kv_dtype, torch.float32))
    pair = _Pair(machine, reference.ops, exact_kv)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, min(199_000, config.vocab_size), (length,), generator=generator)
    x = reference.embedded(ids.tolist())
    pair.where = "the embedding"
    pair.compare("embed", machine.ops.embed(machine.read("embedding"), ids.to(machine.device)), x, 1e-6)
    edges = [length - 1, config.sliding_window - 1, config.sliding_window, 0, config.sliding_window + 1, 1]
    indices = [index for index in dict.fromkeys([*edges, *range(length)]) if 0 <= index < length]
    decodes = [sequence.decodes(sorted(indices[:count])) for count in (_FEW_ROWS if few else _ROWS)]
    steps = [sequence.whole(), sequence.end(max(1, length // 3)), *decodes]
    layers = machine.layers(pair.ops, machine.dtype, fp8_activations=machine.fp8_activations)
    for number, layer in enumerate(layers):
        pair.num_experts = config.experts_in(number)
        model, after = reference.one_layer(number, layer, x, length, pair.ops), []
        for step in steps:
            pair.where = f"layer {number} ({config.layer_types[number].partition('_')[0]}), {step.name}"
            after.append(model.hidden(ForwardBatch(step.tokens, step.tokens[:0], step.meta), [kv]))
        x = after[0]
    pair.where = "the output"
    pair.head(machine, reference.norm, x)
    lengths = [length for length in _LONG if length <= machine.max_model_len]
    for length in lengths[: 1 if machine.plan.quick or machine.device.type == "cpu" else None]:
        for shape in model.shapes:
            _long_attention(machine, pair, shape, length)
    return pair.errors


def _long_attention(machine: Machine, pair: _Pair, shape: AttentionShape, length: int) -> None:
    """Compares attention over a long context of random keys, with queries that attend to few of them."""
    sequence = PagedSequences([length], machine.block_size, machine.device)
    generator = torch.Generator(machine.device).manual_seed(length)
    kv = sequence.pool(machine.model, torch.float32).normal_(generator=generator)
    kv = kv.to(machine.dtype).to(machine.kv_dtype)
    sinks = torch.linspace(-2.0, 12.0, shape.num_heads, device=machine.device)
    for step in (sequence.decodes([length // 2, length - 1]), sequence.end(48)):
        plan = pair.ops.plan_attention(step.meta, shape, machine.block_size)
        size = len(step.tokens), shape.num_heads, shape.head_dim
        q = 4 * torch.randn(size, device=machine.device, generator=generator)
        q = q if machine.ops.name == "reference" else q.to(machine.dtype)
        for group, kind in enumerate(("full", "sliding")):
            pair.where = f"{length:,} tokens ({kind}), {step.name}"
            pair.ops.attention(q, sinks, LayerCache(plan, group, kv))


def small(x: torch.Tensor, eps: float) -> torch.Tensor:
    """Returns ``x`` scaled to a mean square of ``eps``."""
    return x * (math.sqrt(eps) / x.pow(2).mean().sqrt())


def _read(kv: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Returns k and v of some slots: [2, T, Nkv, D] float32."""
    size = kv.shape[3]
    return kv.float()[slots // size, :, :, slots % size].transpose(0, 1)


def _even_choice(ids: torch.Tensor, num_experts: int) -> torch.Tensor:
    """Returns expert ids [T, K] in which every expert is equally frequent, in a random order."""
    (tokens, top_k), generator = ids.shape, torch.Generator().manual_seed(0)
    whole = num_experts - num_experts % top_k
    rounds = -(-tokens * top_k // whole)
    orders = [torch.randperm(num_experts, generator=generator)[:whole] for _ in range(rounds)]
    return torch.cat(orders)[: tokens * top_k].view(tokens, top_k).to(ids.device)
