"""Loads packed ``Weights`` from a checkpoint folder of any layout.

``layouts.py`` defines the names of parameters in files, the ops define their form in memory. On a CPU,
tensors stay views of the mapped file where possible; on a GPU the next layers are read while one is packed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from chorale.errors import CheckpointError
from chorale.kernels.ops import ExpertTensors, Ops, QkvWeights, RouterWeights
from chorale.model.checkpoint import Checkpoint
from chorale.model.config import MXFP4_GROUP, ModelConfig
from chorale.model.cuts import Cut, cut_of
from chorale.model.device_reader import Arrival, DeviceReader
from chorale.model.gpt_oss import LayerWeights, Weights
from chorale.model.layouts import FLOATS, Layout, TensorSpec, tensor_specs
from chorale.parallel.shares import Share

# (phase, fraction of the phase 0..1, message)
Progress = Callable[[str, float, str], None]
EMBEDDING = "embedding"  # its role
# The groups of a layer: tensors that are packed together.
LAYER_GROUPS = ("attention_norm", "qkv", "sinks", "output", "expert_norm", "router", "experts")
_CPU = torch.device("cpu")
_LAYERS_AHEAD = 3  # layers read ahead on a GPU, whose raw tensors take memory in addition to the packed ones


@dataclass(frozen=True, slots=True)
class Target:
    """How weights are packed, and for which device."""

    config: ModelConfig
    ops: Ops
    dtype: torch.dtype  # of dense weights and decoded experts in products
    device: torch.device = _CPU
    fp8_activations: bool = False  # round the experts' inputs to e4m3
    share: Share | None = None  # the part to read; None: everything
    host_embedding: bool = False  # the input embedding stays in host memory

    def cut(self, spec: TensorSpec) -> Cut | None:
        """Returns the part of a tensor that this rank reads; None: all of it."""
        return None if self.share is None else cut_of(spec, self.config, self.share)

    def is_read(self, spec: TensorSpec) -> bool:
        """Returns whether this rank needs any part of the tensor. Input scales of all experts are read,
        because their maximum is used; ``with_kv_scales`` has read those of the KV cache."""
        if spec.role in ("k_scale", "v_scale"):
            return False
        if self.share is None or spec.expert is None or "input_scale" in spec.role:
            return True
        return spec.expert in self.share.experts


def load_weights(folder: str | Path, target: Target, progress: Progress | None = None) -> Weights:
    """Map, check and pack a checkpoint in any of the four layouts.

    Raises ``ConfigError`` if the ops do not support this, and ``CheckpointError`` with file and tensor. The
    files must not change while the weights are in use.
    """
    checkpoint = Checkpoint(Path(folder), target.config)
    source: Source
    if target.device.type == "cuda":
        source = _Streamed(checkpoint, target)
    else:
        source = _Mapped(checkpoint, target)
    report = progress or (lambda *_: None)
    try:
        weights = Loader(source, target).weights(target.config.num_hidden_layers, report)
        report("load", 1.0, f"{checkpoint.num_bytes / 1e9:.2f} GB")
        return weights
    finally:
        source.close()
        for file in checkpoint.files:
            file.release()


def packed_layers(folder: Path, target: Target) -> Iterator[LayerWeights]:
    """Yield the layers of ``load_weights`` one by one, for checks of models that do not fit into memory."""
    loader = Loader(_Mapped(Checkpoint(folder, target.config), target), target)
    for layer in range(target.config.num_hidden_layers):
        yield loader.layer(layer)


def weight_shapes(target: Target, layers: int) -> Weights:
    """Return the packed weights of the first ``layers`` layers as meta tensors, without a checkpoint, for any
    device. Raises ``ConfigError`` like ``load_weights``."""
    target = replace(target, device=torch.device("meta"))
    return Loader(_Shapes(target), target).weights(layers, lambda *_: None)


def group_of(role: str) -> str:
    """Return the group of a role: tensors that are packed together, or the role itself."""
    first = role.split(".")[0]
    return {"q": "qkv", "k": "qkv", "v": "qkv", "gate_up": "experts", "down": "experts"}.get(first, first)


class Source:
    """Reads tensors to the device in the file's dtype, each once."""

    def has(self, layer: int | None, role: str) -> bool:
        raise NotImplementedError

    def read(self, layer: int | None, role: str) -> torch.Tensor:
        raise NotImplementedError

    def on_host(self, layer: int | None, role: str) -> torch.Tensor:
        """Returns a tensor that ``read`` does not return, in host memory."""
        return self.read(layer, role)

    def close(self) -> None:
        """Release what reading needed."""


class _Shapes(Source):
    """Returns meta tensors in the types of the published checkpoints; scalars are 1."""

    def __init__(self, target: Target) -> None:
        config, self._target = target.config, target
        packed: Layout = "quark" if config.expert_input_scales else "published"
        specs = tensor_specs(config, "dense" if config.dense_experts else packed)
        self._specs = {(spec.layer, spec.role): spec for spec in specs}

    def has(self, layer: int | None, role: str) -> bool:
        return (layer, role) in self._specs

    def read(self, layer: int | None, role: str) -> torch.Tensor:
        spec = self._specs[layer, role]
        dtype = torch.bfloat16 if spec.dtypes is FLOATS else torch.uint8
        cut = self._target.cut(spec)
        shape = spec.shape if cut is None else cut.shape(spec.shape)
        return torch.ones(shape, dtype=dtype, device="meta" if shape else "cpu")


class _Mapped(Source):
    """Returns views of the mapped files, moved to other devices (MXFP4: unless the ops decode it)."""

    def __init__(self, checkpoint: Checkpoint, target: Target) -> None:
        self._checkpoint, self._target = checkpoint, target

    def has(self, layer: int | None, role: str) -> bool:
        return self._checkpoint.has(layer, role)

    def read(self, layer: int | None, role: str) -> torch.Tensor:
        part = self.on_host(layer, role)
        stays = self._target.ops.decodes_experts and part.dtype == torch.uint8
        return part if stays else part.to(self._target.device)

    def on_host(self, layer: int | None, role: str) -> torch.Tensor:
        whole = self._checkpoint.read(layer, role)
        cut = self._target.cut(self._checkpoint.spec(layer, role))
        return whole if cut is None else cut.of(whole)


class _Streamed(_Mapped):
    """Reads tensors in the order of ``Loader.weights``, a few layers ahead, except an embedding that stays in
    host memory."""

    def __init__(self, checkpoint: Checkpoint, target: Target) -> None:
        super().__init__(checkpoint, target)
        self._reader = DeviceReader(checkpoint, target.device)
        self._layers: deque[int | None] = deque([*range(checkpoint.num_layers), None])
        self._arrivals: dict[tuple[int | None, str], Arrival] = {}
        for _ in range(_LAYERS_AHEAD):
            self._start_layer()

    def read(self, layer: int | None, role: str) -> torch.Tensor:
        tensor = self._arrivals.pop((layer, role)).wait()
        if not any(owner == layer for owner, _ in self._arrivals):
            self._start_layer()
        return tensor

    def close(self) -> None:
        self._reader.close()

    def _start_layer(self) -> None:
        if self._layers:
            layer = self._layers.popleft()
            for spec in filter(self._target.is_read, self._checkpoint.specs(layer)):
                if spec.role != EMBEDDING or not self._target.host_embedding:
                    arrival = self._reader.start(layer, spec.role, self._target.cut(spec))
                    self._arrivals[layer, spec.role] = arrival


class Loader:
    """Reads tensors of one checkpoint by role, in the dtypes that packing needs."""

    def __init__(self, source: Source, target: Target) -> None:
        self.source, self.target = source, target
        self.config, self.ops, self.dtype = target.config, target.ops, target.dtype
        config, share = target.config, target.share
        self.experts_read = range(config.num_local_experts) if share is None else share.experts
        # A bias of a sum over ranks is added by one rank only. With whole experts, the expert's rank keeps
        # it.
        self.adds_output_bias = share is None or share.is_first
        self.adds_down_bias = self.adds_output_bias or len(self.experts_read) < config.num_local_experts

    def weights(self, layers: int, report: Progress) -> Weights:
        """Pack the first ``layers`` layers, and the tensors of the whole model."""
        packed = []
        for layer in range(layers):
            report("load", layer / (layers + 1), f"layer {layer}")
            packed.append(self.layer(layer))
        report("load", layers / (layers + 1), "embedding and output")
        return Weights(
            embedding=self.embedding(),
            layers=tuple(packed),
            final_norm=self.group(None, "final_norm"),
            head=self.group(None, "head"),
            num_parameters=self.config.num_parameters,
        )

    def embedding(self) -> Any:
        if not self.target.host_embedding or self.ops.pack_host_rows is None:
            return self.source.read(None, EMBEDDING)
        return self.ops.pack_host_rows(self.source.on_host(None, EMBEDDING), self.target.device)

    def layer(self, layer: int) -> LayerWeights:
        norm, qkv, sinks, output, expert_norm, router, experts = (
            self.group(layer, group) for group in LAYER_GROUPS
        )
        routing = RouterWeights(expert_norm, router, self.config.num_experts_per_tok, self.dtype)
        return LayerWeights(QkvWeights(norm, qkv), sinks, output, routing, experts)

    def group(self, layer: int | None, group: str) -> Any:
        """Pack the tensors of one group (``group_of``)."""
        if layer is None:
            if group == EMBEDDING:
                return self.embedding()
            return (
                self.ops.pack_head(self.dense(None, group)) if group == "head" else self.float32(None, group)
            )
        if group == "qkv":
            return self.ops.pack_linear(self.qkv(layer, "weight"), self.qkv(layer, "bias"))
        if group == "output":
            pack_output = self.ops.pack_output or self.ops.pack_linear
            return pack_output(self.projection(layer, "output", "weight"), self.output_bias(layer))
        if group == "router":
            # Float32 in every mode: the tensors are small, and a rounded logit can choose another expert.
            weight, bias = (self.float32(layer, f"router.{part}") for part in ("weight", "bias"))
            return self.ops.pack_router(weight, bias, self.dtype)
        return self.experts(layer) if group == "experts" else self.float32(layer, group)

    def experts(self, layer: int) -> object:
        tensors = {
            field: self.stacked(layer, role)
            for field, role in _EXPERT_FIELDS.items()
            if self.source.has(layer, role) or self.source.has(layer, f"{role}/0")
        }
        if not self.adds_down_bias:
            tensors["down_bias"] = torch.zeros_like(tensors["down_bias"])
        return self.ops.pack_experts(
            ExpertTensors(
                **tensors,
                swiglu_limit=self.config.swiglu_limit,
                swiglu_alpha=self.config.swiglu_alpha,
                num_layers=self.config.num_hidden_layers,
                dtype=self.dtype,
                fp8_activations=self.target.fp8_activations,
                gate_up_input_scale=self.input_scale(layer, "gate_up"),
                down_input_scale=self.input_scale(layer, "down"),
            )
        )

    def stacked(self, layer: int, role: str) -> torch.Tensor:
        """Return one tensor for all experts, stacked if the checkpoint has one per expert."""
        if self.source.has(layer, role):
            return self.source.read(layer, role)
        each = [self.source.read(layer, f"{role}/{n}") for n in self.experts_read]
        whole = torch.stack(each)
        return whole.unflatten(-1, (-1, MXFP4_GROUP // 2)) if role.endswith(".blocks") else whole

    def input_scale(self, layer: int, name: str) -> float | None:
        """Return the scale of one product's e4m3 inputs in a layer: the maximum over its experts."""
        role = f"{name}.input_scale"
        if not self.source.has(layer, f"{role}/0"):
            return None
        scales = torch.stack(
            [
                self.source.read(layer, f"{role}/{n}").float().reshape(())
                for n in range(self.config.num_local_experts)
            ]
        )
        if not bool(((scales > 0) & scales.isfinite()).all()):
            raise CheckpointError(f"layer {layer}: {name}_proj.input_scale: not a positive number")
        return float(scales.max())

    def qkv(self, layer: int, part: str) -> torch.Tensor:
        """Read one tensor (reference layout) or three (other layouts); rows in the order q, k, v."""
        if self.source.has(layer, f"qkv.{part}"):
            return self.dense(layer, f"qkv.{part}")
        return torch.cat([self.projection(layer, name, part) for name in "qkv"])

    def projection(self, layer: int, name: str, part: str) -> torch.Tensor:
        """Read a tensor of attention, times its factor for the scales of the KV cache."""
        tensor, factor = self.dense(layer, f"{name}.{part}"), self.config.kv_factor(layer, name)
        return tensor if factor == 1.0 else tensor * factor

    def output_bias(self, layer: int) -> torch.Tensor:
        bias = self.dense(layer, "output.bias")
        return bias if self.adds_output_bias else torch.zeros_like(bias)

    def dense(self, layer: int | None, role: str) -> torch.Tensor:
        tensor = self.source.read(layer, role)
        return tensor if self.ops.keeps_dtypes else tensor.to(self.dtype)

    def float32(self, layer: int | None, role: str) -> torch.Tensor:
        return self.source.read(layer, role).to(torch.float32)


_EXPERT_FIELDS = {
    "gate_up_bias": "gate_up.bias",
    "down_bias": "down.bias",
    "gate_up_blocks": "gate_up.blocks",
    "gate_up_scales": "gate_up.scales",
    "down_blocks": "down.blocks",
    "down_scales": "down.scales",
    "gate_up": "gate_up.dense",
    "down": "down.dense",
}
