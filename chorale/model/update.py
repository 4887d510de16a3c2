"""WeightUpdate: new tensors for a rank's weights, under names and in shapes of any layout of a checkpoint.

Tensors arrive in any order. Once a group is complete (tensors that are packed together: the experts of a
layer, or q, k and v with their biases), it is packed. Groups of which nothing arrives keep their values.
The weights themselves change at once or not at all: either new objects wait until ``finish``, or, if other
objects know the addresses of the weights (captured graphs), the old values are saved before they are
overwritten, and ``abandon`` restores them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch

from chorale.errors import CheckpointError
from chorale.kernels import mxfp4
from chorale.model.checkpoint import check_shape
from chorale.model.gpt_oss import Weights
from chorale.model.layouts import FLOATS, Layout, TensorSpec, kv_scale_specs, tensor_specs
from chorale.model.safetensors_file import DTYPES
from chorale.model.weights import EMBEDDING, Loader, Source, Target, group_of

Key = tuple[int | None, str]  # layer (None: the whole model) and role, or layer and group
Save = Callable[[Sequence[torch.Tensor]], None]  # saves values that are about to be overwritten
_NAME = {dtype: name for name, dtype in DTYPES.items()}


class WeightUpdate:
    """One update. After an error, only ``abandon`` may be called."""

    def __init__(self, target: Target, weights: Weights, save: Save | None) -> None:
        """``save``: overwrite the tensors of ``weights``, each after a call of ``save``; None: leave them."""
        self._weights, self._save, self._target = weights, save, target
        config, self._sent = target.config, _Sent()
        self._loader = Loader(self._sent, target)
        self._specs: dict[str, TensorSpec] = {}
        # Group -> the sets of roles that complete it, one for each layout.
        self._complete: defaultdict[Key, list[set[str]]] = defaultdict(list)
        layouts: tuple[Layout, ...] = ("published", "dense", "reference")
        for layout in ("quark",) if config.expert_input_scales else layouts:
            groups = defaultdict[Key, set[str]](set)
            for spec in tensor_specs(config, layout):
                self._specs[spec.name] = spec
                groups[spec.layer, group_of(spec.role)].add(spec.role)
            for key, roles in groups.items():
                self._complete[key].append(roles)
        # The weights keep the scales of the KV cache with which they were loaded.
        self._unused = {spec.name: spec for spec in kv_scale_specs(config)}
        self._seen: set[str] = set()  # names
        self._arrived: defaultdict[Key, set[str]] = defaultdict(set)  # roles of incomplete groups

    def check(self, name: str, dtype: torch.dtype, shape: Sequence[int]) -> None:
        """Raise ``CheckpointError`` unless the model has this tensor, and the update not yet."""
        spec = self._specs.get(name) or self._unused.get(name)
        if spec is None:
            raise CheckpointError(f"{name[:200]!r}: not a tensor of this model")
        if name in self._seen:
            raise CheckpointError(f"{name}: sent twice in one update")
        found = _NAME.get(dtype, str(dtype).removeprefix("torch."))
        check_shape("the update", spec, found, tuple(shape))

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Take a tensor, and pack its group if it is complete. Its memory must not change until ``keep``; on
        a CPU, never. Raises ``CheckpointError``."""
        self.check(name, tensor.dtype, tensor.shape)
        if name in self._unused:
            return
        spec = self._specs[name]
        self._seen.add(name)
        for role, part in self._parts(spec, tensor):
            self._arrived[spec.layer, group_of(spec.role)].add(role)
            if part is not None:
                self._sent.tensors[spec.layer, role] = part
        key = spec.layer, group_of(spec.role)
        if any(roles == self._arrived[key] for roles in self._complete[key]):
            self._pack(key)

    def keep(self) -> None:
        """Copy the tensors of incomplete groups, because the sender will reuse their memory."""
        for key, tensor in self._sent.tensors.items():
            self._sent.tensors[key] = tensor.clone()

    def check_complete(self) -> None:
        """Raise ``CheckpointError`` if a group is incomplete, or if nothing was sent."""
        if not self._seen:
            raise CheckpointError("no tensor was sent")
        for (layer, group), roles in self._arrived.items():
            wanted = max(self._complete[layer, group], key=lambda each: len(each & roles))
            missing = ", ".join(sorted(wanted ^ roles)[:4])
            raise CheckpointError(
                f"layer {layer}: {missing}: missing; all tensors of {group} must be sent in one update"
            )

    def finish(self) -> Weights:
        """Return the new weights: the old ones if these were overwritten. Raises as ``check_complete``."""
        self.check_complete()
        return self._weights

    def _parts(self, spec: TensorSpec, tensor: torch.Tensor) -> list[tuple[str, torch.Tensor | None]]:
        """Return this rank's part by role, or None. Dense experts become MXFP4 if the model's are."""
        if not self._target.is_read(spec):
            return [(spec.role, None)]
        cut = self._target.cut(spec)
        part = (tensor.view(spec.shape) if cut is None else cut.of(tensor)).detach()
        stays = spec.role == EMBEDDING and self._target.host_embedding
        if not stays and not (self._target.ops.decodes_experts and part.dtype == torch.uint8):
            part = part.to(self._target.device)
        if spec.dtypes is FLOATS and not bool(part.isfinite().all()):
            raise CheckpointError(f"{spec.name}: has values that are not finite")
        if spec.role.endswith(".dense") and not self._target.config.dense_experts:
            name = spec.role.removesuffix(".dense")
            # One expert at a time, to bound the memory.
            packed = [mxfp4.quantize(expert.t().contiguous()) for expert in part]
            blocks, scales = (torch.stack(each) for each in zip(*packed, strict=True))
            return [(f"{name}.blocks", blocks), (f"{name}.scales", scales)]
        return [(spec.role, part)]

    def _pack(self, key: Key) -> None:
        layer, group = key
        packed = self._loader.group(layer, group)
        for role in self._arrived.pop(key):
            self._sent.tensors.pop((layer, role), None)
        path = _path(layer, group)
        if self._save is None:
            self._weights = replaced(self._weights, path, packed)
            return
        old: Any = self._weights
        for name in path:
            old = old[name] if isinstance(name, int) else getattr(old, name)
        pairs = tensor_pairs(old, packed, f"layer {layer}, {group}")
        self._save([tensor for tensor, _ in pairs])
        for tensor, new in pairs:
            tensor.copy_(new)


class _Sent(Source):
    """The ``Source`` of the tensors that have arrived."""

    def __init__(self) -> None:
        self.tensors: dict[Key, torch.Tensor] = {}

    def has(self, layer: int | None, role: str) -> bool:
        return (layer, role) in self.tensors

    def read(self, layer: int | None, role: str) -> torch.Tensor:
        return self.tensors[layer, role]

    def on_host(self, layer: int | None, role: str) -> torch.Tensor:
        return self.tensors[layer, role].cpu()


def _path(layer: int | None, group: str) -> tuple[str | int, ...]:
    """Return the place of a packed group in ``Weights``."""
    nested = {"attention_norm": ("qkv", "norm"), "qkv": ("qkv", "linear"),
              "expert_norm": ("router", "norm"), "router": ("router", "linear")}  # fmt: skip
    return (group,) if layer is None else ("layers", layer, *nested.get(group, (group,)))


def replaced(owner: Any, path: tuple[str | int, ...], value: Any) -> Any:
    """Return ``owner``, a tree of frozen dataclasses and tuples, with another value at ``path``."""
    if not path:
        return value
    first, rest = path[0], path[1:]
    if isinstance(first, int):
        return (*owner[:first], replaced(owner[first], rest, value), *owner[first + 1 :])
    return replace(owner, **{first: replaced(getattr(owner, first), rest, value)})


def tensor_pairs(old: Any, new: Any, where: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return (old, new) for each tensor in two packed groups. Raises ``CheckpointError`` if anything but the
    values of tensors differs."""
    if isinstance(old, torch.Tensor):
        if isinstance(new, torch.Tensor) and (old.shape, old.dtype) == (new.shape, new.dtype):
            return [(old, new)]
    elif is_dataclass(old) and type(old) is type(new):
        # Of rows in host memory, the addresses stay.
        names = ["pieces"] if hasattr(old, "pieces") else [each.name for each in fields(old)]
        both = [(getattr(old, name), getattr(new, name)) for name in names]
        return [pair for each in both for pair in tensor_pairs(*each, where)]
    elif isinstance(old, tuple) and isinstance(new, tuple) and len(old) == len(new):
        return [pair for each in zip(old, new, strict=True) for pair in tensor_pairs(*each, where)]
    elif type(old) is type(new) and old == new:
        return []
    raise CheckpointError(f"{where}: packed in another way; send the types of the checkpoint that was loaded")
