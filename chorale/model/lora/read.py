"""read_adapter: an adapter's folder -> ``Adapter``, with every tensor accounted for.

Everything that would silently leave out a part of the adapter is an ``AdapterError``: an unknown name, half
of a pair, a layer that the model lacks, another shape, and tensors that add nothing. Files are read like
checkpoints: no memory is allocated by a number in a header. The tensors are copies in the file's types.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import torch

from chorale.errors import AdapterError, CheckpointError
from chorale.kernels.adapters import Adapter, ExpertLowRank, LayerAdapter, LowRank, tensors_of
from chorale.model.config import ModelConfig
from chorale.model.lora.config import MAX_RANK, AdapterConfig, load_config
from chorale.model.lora.names import Half, Place, Role, place_of
from chorale.model.safetensors_file import SafetensorsFile

FILE = "adapter_model.safetensors"
_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
_Key = tuple[int | None, str, int | None]  # layer, module, expert


@dataclass(frozen=True, slots=True)
class _Pair:
    """The halves of one product's adapter: ``a`` [r, K], ``b`` [N, r]. Stacked: [r E, K], [N, r E]."""

    place: Place
    a: torch.Tensor
    b: torch.Tensor
    bias: torch.Tensor | None


def read_adapter(folder: Path, model: ModelConfig, max_rank: int = MAX_RANK) -> Adapter:
    """Read and check an adapter of this model. Raises ``AdapterError``."""
    if not folder.is_dir():
        raise AdapterError(f"{folder}: no such folder")
    config = load_config(folder, model, max_rank)
    reader = _Reader(config, model, _open(folder), max_rank)
    adapter = reader.adapter()
    _check_values(folder, adapter, reader.has_effect)
    return adapter


def _open(folder: Path) -> SafetensorsFile:
    path = folder / FILE
    if not path.exists():
        pickled = [name for name in ("adapter_model.bin", "adapter_model.pt") if (folder / name).exists()]
        hint = f"; {pickled[0]} is not read, because pickled files can run code" if pickled else ""
        raise AdapterError(f"{path}: missing{hint}")
    try:
        return SafetensorsFile(path, _DTYPES)
    except CheckpointError as fault:
        raise AdapterError(fault.message) from fault


def _check_values(folder: Path, adapter: Adapter, has_effect: bool) -> None:
    if not all(bool(tensor.isfinite().all()) for tensor in tensors_of(adapter)):
        raise AdapterError(f"{folder}: a value is not finite")
    if not has_effect:
        raise AdapterError(f"{folder}: the adapter changes nothing: in every pair, lora_A or lora_B is 0")


class _Reader:
    """Turns the tensors of one file into an ``Adapter``."""

    def __init__(
        self, config: AdapterConfig, model: ModelConfig, file: SafetensorsFile, max_rank: int
    ) -> None:
        self.config, self.model, self.file, self.max_rank = config, model, file, max_rank
        self.has_effect = False
        hidden, inner = model.hidden_size, model.intermediate_size
        query, key = (n * model.head_dim for n in (model.num_attention_heads, model.num_key_value_heads))
        self.first = {"q": 0, "k": query, "v": query + key}
        # (inputs, outputs) of each product
        self.sizes: dict[Role, tuple[int, int]] = {
            "q": (hidden, query), "k": (hidden, key), "v": (hidden, key), "o": (query, hidden),
            "router": (hidden, model.num_local_experts), "gate_up": (hidden, 2 * inner),
            "gate": (hidden, inner), "up": (hidden, inner), "down": (inner, hidden),
            "head": (hidden, model.vocab_size),
        }  # fmt: skip

    def adapter(self) -> Adapter:
        found = self._named()
        head = self._head(found.pop((None, "lm_head", None), {}))
        by_layer: dict[int, list[_Pair]] = defaultdict(list)
        for (layer, module, _), halves in found.items():
            assert layer is not None
            by_layer[layer].append(self._pair(module, halves))
        self._check_layers(by_layer)
        swapped = self._is_swapped([pair for pairs in by_layer.values() for pair in pairs])
        layers = range(self.model.num_hidden_layers)
        return Adapter(tuple(self._layer(by_layer.get(layer, []), swapped) for layer in layers), head)

    def error(self, problem: str) -> AdapterError:
        return AdapterError(f"{self.file.path}: {problem}")

    def _named(self) -> dict[_Key, dict[Half, tuple[Place, str]]]:
        """Return the names of the tensors of each product."""
        found: dict[_Key, dict[Half, tuple[Place, str]]] = defaultdict(dict)
        for name in self.file.entries:
            place = place_of(name)
            if place is None:
                raise self.error(f"{name}: not a tensor that an adapter of this model can have")
            if place.layer is not None and place.layer >= self.model.num_hidden_layers:
                count = self.model.num_hidden_layers
                raise self.error(f"{name}: this model has {count} layers; the adapter is for another base")
            if len(set(self.model.layer_experts)) > 1 and place.role not in ("q", "k", "v", "o", "head"):
                problem = "router and experts cannot be adapted: layers have different numbers of experts"
                raise self.error(f"{name}: {problem}")
            if place.expert is not None and place.expert >= self.model.num_local_experts:
                count = self.model.num_local_experts
                raise self.error(f"{name}: this model has {count} experts; the adapter is for another base")
            halves = found[place.layer, place.module, place.expert]
            if place.half in halves:
                raise self.error(f"{name}: the same tensor as {halves[place.half][1]}")
            halves[place.half] = place, name
        return found

    def _tensor(self, name: str, *shape: int) -> torch.Tensor:
        """Read a tensor; -1 in ``shape`` is any size."""
        actual = self.file.entries[name].shape
        if len(actual) != len(shape) or any(
            want not in (-1, size) for want, size in zip(shape, actual, strict=True)
        ):
            wanted = ["any" if size < 0 else size for size in shape]
            raise self.error(f"{name}: shape {list(actual)}, this model needs {wanted}")
        return self.file.tensor(name).clone()

    def _head(self, halves: dict[Half, tuple[Place, str]]) -> LowRank | torch.Tensor | None:
        full = halves.pop("full", None)
        base = halves.pop("base", None)  # PEFT's copy of the unchanged head beside a LoRA pair
        inputs, outputs = self.sizes["head"]
        if (full is not None) != self.config.saves_head:
            problem = "is missing" if full is None else "is there, but modules_to_save does not name lm_head"
            raise self.error(f"lm_head.weight {problem}")
        if full is not None:
            if halves or base is not None:
                raise self.error("lm_head: both a replacement and a LoRA pair")
            self.has_effect = True
            return self._tensor(full[1], outputs, inputs)
        if not halves:
            if base is not None:
                raise self.error(f"{base[1]}: without the LoRA pair of lm_head")
            return None
        return self._low_rank(self._pair("lm_head", halves))

    def _pair(self, module: str, halves: dict[Half, tuple[Place, str]]) -> _Pair:
        if missing := {"A", "B"} - halves.keys():
            raise self.error(f"{module}: lora_{min(missing)}.weight is missing")
        place = halves["A"][0]
        if place.role == "stacked":
            a, b = self._tensor(halves["A"][1], -1, -1), self._tensor(halves["B"][1], -1, -1)
            return _Pair(place, a, b, None)
        inputs, outputs = self.sizes[place.role]
        a = self._tensor(halves["A"][1], -1, inputs)
        b = self._tensor(halves["B"][1], outputs, len(a))
        self.config.check_rank(module, len(a))
        bias = self._tensor(halves["bias"][1], outputs) if "bias" in halves else None
        if bias is not None and place.expert is not None:
            raise self.error(f"{halves['bias'][1]}: biases of experts are not supported")
        if bias is not None and place.role == "head":
            raise self.error(f"{halves['bias'][1]}: the head has no bias")
        return _Pair(place, a, b, bias)

    def _check_layers(self, by_layer: dict[int, list[_Pair]]) -> None:
        """Check that modules which the configuration wants in every layer are in every layer."""
        for name in self.config.in_each_layer:
            have = {n for n, pairs in by_layer.items() if any(p.place.module.endswith(name) for p in pairs)}
            absent = set(range(self.model.num_hidden_layers)) - have
            if absent:
                raise self.error(
                    f"layer {min(absent)} has no {name}, which target_modules names: the adapter is "
                    "incomplete, or for another base"
                )

    # ------------------------------------------------------------------ layers

    def _layer(self, pairs: list[_Pair], swapped: bool) -> LayerAdapter:
        by_role: dict[str, list[_Pair]] = defaultdict(list)
        for pair in pairs:
            by_role[pair.place.role].append(pair)
        stacked = [self._stacked(pair, swapped) for pair in by_role["stacked"]]
        if stacked and any(by_role[role] for role in ("gate_up", "gate", "up", "down")):
            raise self.error(f"{by_role['stacked'][0].place.module}: beside adapters of single experts")
        both = dict(stacked)
        if len(both) < len(stacked):
            raise self.error(f"{by_role['stacked'][0].place.module}: two adapters of {stacked[0][0]}_proj")
        if by_role["gate_up"] and (by_role["gate"] or by_role["up"]):
            raise self.error(f"{by_role['gate_up'][0].place.module}: beside adapters of gate or up alone")
        gate_up = self._experts(by_role["gate_up"]) or self._halves(by_role["gate"], by_role["up"])
        o, router = by_role["o"], by_role["router"]
        for same in (o, router):
            if len(same) > 1:
                raise self.error(f"{same[0].place.module}: two adapters")
        return LayerAdapter(
            qkv=tuple(self._low_rank(pair) for role in "qkv" for pair in by_role[role]),
            output=self._low_rank(o[0]) if o else None,
            router=self._low_rank(router[0]) if router else None,
            gate_up=both.get("gate_up") or gate_up,
            down=both.get("down") or self._experts(by_role["down"]),
        )

    def _low_rank(self, pair: _Pair) -> LowRank:
        scale, factor = self.config.scale(pair.place.module, len(pair.a)), 1.0
        self._note(pair.a, pair.b, pair.bias)
        layer, role = pair.place.layer, pair.place.role
        if layer is not None and role in ("q", "k", "v", "o"):
            factor = self.model.kv_factor(layer, "output" if role == "o" else role)
        bias = None if pair.bias is None else _scaled(pair.bias, scale * (1 if role == "o" else factor))
        return LowRank(pair.a, _scaled(pair.b, scale * factor), bias, self.first.get(role, 0))

    def _note(self, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.has_effect |= bool(a.any() and b.any()) or bool(bias is not None and bias.any())

    def _experts(self, pairs: list[_Pair]) -> ExpertLowRank | None:
        """Stack the pairs of single experts."""
        if not pairs:
            return None
        self._same_rank(pairs)
        places = [-1] * self.model.num_local_experts
        for index, pair in enumerate(pairs):
            assert pair.place.expert is not None
            places[pair.place.expert] = index
            self._note(pair.a, pair.b)
        scaled = [_scaled(pair.b, self.config.scale(pair.place.module, len(pair.a))) for pair in pairs]
        return ExpertLowRank(torch.stack([pair.a for pair in pairs]), torch.stack(scaled), tuple(places))

    def _halves(self, gates: list[_Pair], ups: list[_Pair]) -> ExpertLowRank | None:
        """Combine adapters of gate and up, which have separate inputs, into one of twice the rank."""
        gate, up = self._experts(gates), self._experts(ups)
        if gate is None and up is None:
            return None
        if gate is None or up is None:
            raise self.error(f"{(gates or ups)[0].place.module}: gate_proj and up_proj must both be adapted")
        rank, other = gate.a.shape[1], up.a.shape[1]
        order = [0] * len(up.a)
        for expert, place in enumerate(gate.places):
            if (place < 0) is not (up.places[expert] < 0):
                raise self.error(f"expert {expert}: gate_proj and up_proj must both be adapted")
            if place >= 0:
                order[place] = up.places[expert]
        b = gate.b.new_zeros(len(gate.b), 2 * gate.b.shape[1], rank + other)
        b[:, 0::2, :rank], b[:, 1::2, rank:] = gate.b, up.b[order]
        return ExpertLowRank(torch.cat((gate.a, up.a[order]), dim=1), b, gate.places)

    def _same_rank(self, pairs: list[_Pair]) -> None:
        ranks = {len(pair.a) for pair in pairs}
        if len(ranks) > 1:
            raise self.error(f"{pairs[0].place.module}: the experts of a layer have ranks {sorted(ranks)}")

    # ------------------------------------------------------------------ 3-D tensors

    def _candidates(self, pair: _Pair) -> list[tuple[Role, bool]]:
        """Return which products a stacked pair may belong to, and whether its dimensions are swapped: PEFT
        takes the parameter as [E, in, out] or, in some versions, as [E, out, in]."""
        given = pair.a.shape[1], pair.b.shape[0]
        roles: tuple[Role, ...] = ("gate_up", "down")
        return [
            (role, swapped)
            for role in roles
            for swapped in (False, True)
            if given == (self.sizes[role][::-1] if swapped else self.sizes[role])
        ]

    def _is_swapped(self, pairs: list[_Pair]) -> bool:
        """Return the one order of dimensions that fits every stacked pair."""
        stacked = [pair for pair in pairs if pair.place.role == "stacked"]
        orders = {False, True}
        for pair in stacked:
            fits = {swapped for _, swapped in self._candidates(pair)}
            if not fits:
                problem = f"lora_A {list(pair.a.shape)} and lora_B {list(pair.b.shape)}"
                raise self.error(f"{pair.place.module}: {problem} fit neither gate_up_proj nor down_proj")
            orders &= fits
        if stacked and not orders:
            raise self.error(f"{stacked[0].place.module}: the tensors have both orders of dimensions")
        before_swaps = bool(self.config.peft_version) and self.config.peft_version < (0, 18)
        if stacked and len(orders) > 1 and not before_swaps:
            raise self.error(
                f"{stacked[0].place.module}: down_proj is square in this model, so the tensors do not show "
                "whether they are [E, in, out] or [E, out, in]; adapt gate_up_proj too, or merge with PEFT"
            )
        return orders == {True}

    def _stacked(self, pair: _Pair, swapped: bool) -> tuple[Role, ExpertLowRank]:
        role = next(role for role, order in self._candidates(pair) if order is swapped)
        experts, total = self.model.num_local_experts, len(pair.a)
        rank = total // experts
        if not rank or total % experts or pair.b.shape[1] != total:
            raise self.error(
                f"{pair.place.module}: {total} rows of lora_A are not a rank for {experts} experts"
            )
        if rank > self.max_rank:
            raise self.error(f"{pair.place.module}: rank {rank} is over the limit of {self.max_rank}")
        module = f"{pair.place.module.removesuffix('.base_layer')}.{role}_proj"
        self.config.check_rank(module, rank)
        self._note(pair.a, pair.b)
        a = pair.a.view(experts, rank, -1)  # [E, r, in]
        b = pair.b.view(-1, rank, experts).permute(2, 0, 1)  # [E, out, r]
        if swapped:
            a, b = b.transpose(1, 2), a.transpose(1, 2)
        scaled = _scaled(b, self.config.scale(module, rank)).contiguous()
        return role, ExpertLowRank(a.contiguous(), scaled, tuple(range(experts)))


def _scaled(tensor: torch.Tensor, scale: float) -> torch.Tensor:
    """Multiply; the result has the tensor's type if that is exact (a power of two), else float32."""
    exact = math.frexp(scale)[0] == 0.5
    return tensor * scale if exact else tensor.float() * scale
