"""Writes small LoRA adapters in the formats of their trainers, and the weights that they stand for."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from chorale.model.config import ModelConfig
from chorale.model.layouts import tensor_specs

RANK, ALPHA = 4, 12  # the scale, 3, is not a power of two
Tensors = dict[str, torch.Tensor]


def write_folder(folder: Path, tensors: Tensors, **config: Any) -> Path:
    """Writes an adapter of any tensors. ``config``: keys of adapter_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    base = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "bias": "none", "peft_version": "0.21.0"}
    (folder / "adapter_config.json").write_text(json.dumps(base | config))
    whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(whole, folder / "adapter_model.safetensors")
    return folder


class Draft:
    """An adapter in the making: ``tensors`` for its file, ``deltas`` for the dense checkpoint (by its names).

    A delta of a weight [N, K] is scale * B A; of experts [E, K, N], its transpose for each expert.
    """

    def __init__(self, config: ModelConfig, seed: int = 0, scale: float = ALPHA / RANK) -> None:
        self.config, self.scale = config, scale
        self.tensors: Tensors = {}
        self.deltas: Tensors = {}
        self.replaced: Tensors = {}
        self._generator = torch.Generator().manual_seed(seed)
        self.shapes = {spec.name: spec.shape for spec in tensor_specs(config, "dense")}

    def draw(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self._generator) * 0.1

    def pair(self, module: str, inputs: int, outputs: int) -> torch.Tensor:
        """Adds a pair; returns scale * B A [N, K]."""
        a, b = self.draw(RANK, inputs), self.draw(outputs, RANK)
        self.tensors[f"base_model.model.{module}.lora_A.weight"] = a
        self.tensors[f"base_model.model.{module}.lora_B.weight"] = b
        return self.scale * b @ a

    def linear(self, module: str) -> None:
        outputs, inputs = self.shapes[f"{module}.weight"]
        self.deltas[f"{module}.weight"] = self.pair(module, inputs, outputs)

    def stacked(self, experts: str, name: str, wrapper: str, *, swapped: bool = False) -> None:
        """PEFT's target_parameters: one pair for all experts, in either order of dimensions."""
        count, inputs, outputs = self.shapes[f"{experts}.{name}"]
        first, second = (outputs, inputs) if swapped else (inputs, outputs)
        a, b = self.draw(RANK * count, first), self.draw(second, RANK * count)
        self.tensors[f"base_model.model.{wrapper}.lora_A.weight"] = a
        self.tensors[f"base_model.model.{wrapper}.lora_B.weight"] = b
        form = "ore,eri->eoi" if swapped else "ore,eri->eio"
        split = b.view(second, RANK, count), a.view(count, RANK, first)
        self.deltas[f"{experts}.{name}"] = self.scale * torch.einsum(form, *split)

    def each_expert(self, experts: str, name: str, chosen: Iterator[int] | range, spelling: str) -> None:
        """A pair for each expert. ``spelling``: of its module, with N for the expert's number."""
        count, inputs, outputs = self.shapes[f"{experts}.{name}"]
        delta = self.deltas.setdefault(f"{experts}.{name}", torch.zeros(count, inputs, outputs))
        step = 2 if "gate_proj" in spelling or ".up_proj" in spelling else 1
        first = 1 if ".up_proj" in spelling else 0
        for expert in chosen:
            module = f"{experts}.{spelling.replace('N', str(expert))}"
            delta[expert, :, first::step] = self.pair(module, inputs, outputs // step).t()

    def write(self, folder: Path, **config: Any) -> Path:
        return write_folder(folder, self.tensors, **config)


def _layers(draft: Draft) -> Iterator[tuple[str, str]]:
    for layer in range(draft.config.num_hidden_layers):
        yield f"model.layers.{layer}.self_attn", f"model.layers.{layer}.mlp"


def attention(draft: Draft) -> dict[str, Any]:
    for module, _ in _layers(draft):
        for name in "qkvo":
            draft.linear(f"{module}.{name}_proj")
    return {"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]}


def bias(draft: Draft) -> dict[str, Any]:
    for module, _ in _layers(draft):
        for name in ("q_proj", "o_proj"):
            draft.linear(f"{module}.{name}")
            own = draft.draw(draft.shapes[f"{module}.{name}.bias"][0])
            draft.tensors[f"base_model.model.{module}.{name}.lora_B.bias"] = own
            draft.deltas[f"{module}.{name}.bias"] = draft.scale * own
    return {"lora_bias": True}


def router(draft: Draft) -> dict[str, Any]:
    for _, mlp in _layers(draft):
        draft.linear(f"{mlp}.router")
    return {"target_parameters": ["mlp.router.weight"]}


def parameters(draft: Draft, *, swapped: bool = False) -> dict[str, Any]:
    for _, mlp in _layers(draft):
        experts = f"{mlp}.experts"
        draft.stacked(experts, "gate_up_proj", f"{experts}.base_layer", swapped=swapped)
        draft.stacked(experts, "down_proj", experts, swapped=swapped)
    return {"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}


def swapped_parameters(draft: Draft) -> dict[str, Any]:
    return parameters(draft, swapped=True)


def unsloth(draft: Draft) -> dict[str, Any]:
    """Some experts of each layer, all named one by one."""
    for _, mlp in _layers(draft):
        experts = f"{mlp}.experts"
        draft.each_expert(experts, "gate_up_proj", range(0, 8, 3), "gate_up_projs.N")
        draft.each_expert(experts, "down_proj", range(1, 8, 2), "down_projs.N")
    return {}


def tinker(draft: Draft) -> dict[str, Any]:
    """Attention, every expert with separate gate and up, and the head."""
    for module, mlp in _layers(draft):
        experts = f"{mlp}.experts"
        for name in "qkvo":
            draft.linear(f"{module}.{name}_proj")
        for name, stored in (("gate", "gate_up"), ("up", "gate_up"), ("down", "down")):
            draft.each_expert(experts, f"{stored}_proj", range(8), f"N.{name}_proj")
    draft.linear("lm_head")
    return {"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]}


def head(draft: Draft) -> dict[str, Any]:
    draft.linear("model.layers.0.self_attn.v_proj")
    own = draft.draw(*draft.shapes["lm_head.weight"])
    draft.tensors["base_model.model.lm_head.weight"] = own
    draft.replaced["lm_head.weight"] = own
    return {"modules_to_save": ["lm_head"]}


FORMATS: dict[str, Callable[[Draft], dict[str, Any]]] = {
    each.__name__: each
    for each in (attention, bias, router, parameters, swapped_parameters, unsloth, tinker, head)
}


def write_adapter(folder: Path, config: ModelConfig, form: str = "attention", seed: int = 0) -> Draft:
    """Writes a random adapter to ``folder``; returns its tensors and deltas."""
    draft = Draft(config, seed)
    draft.write(folder, **FORMATS[form](draft))
    return draft
