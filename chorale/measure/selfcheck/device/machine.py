"""The device, ops and sizes that the engine would use with the given options, and the checkpoint's files."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from chorale.kernels import select_ops
from chorale.kernels.ops import Ops, with_compact
from chorale.measure.selfcheck.check import Plan
from chorale.model.checkpoint import Checkpoint
from chorale.model.config import ModelConfig
from chorale.model.gpt_oss import LayerWeights
from chorale.model.hub import resolve_model
from chorale.model.weights import Target, packed_layers
from chorale.runtime.device import DTYPES, open_device
from chorale.runtime.sizing.resolve import cpu_precision, default_threads, resolve


@dataclass(frozen=True, slots=True)
class Machine:
    """The inputs of the device checks."""

    plan: Plan
    folder: Path
    model: ModelConfig
    checkpoint: Checkpoint
    device: torch.device
    ops: Ops
    dtype: torch.dtype
    kv_dtype: torch.dtype
    block_size: int
    max_model_len: int
    fp8_activations: bool = False
    int8: bool = False  # the CPU ops round inputs and weights of products to 8 bits

    @property
    def is_exact(self) -> bool:
        return self.dtype == self.kv_dtype == torch.float32 and not self.fp8_activations

    def read(self, role: str) -> torch.Tensor:
        """Returns a tensor that belongs to no layer, in the file's dtype."""
        return self.checkpoint.read(None, role).to(self.device)

    def layers(
        self, ops: Ops, dtype: torch.dtype, *, fp8_activations: bool = False
    ) -> Iterator[LayerWeights]:
        """Yields the layers, packed by ``ops``."""
        target = Target(self.model, ops, dtype, self.device, fp8_activations)
        return packed_layers(self.folder, target)

    def of(self, folder: Path) -> Machine:
        """Returns the same machine with another checkpoint."""
        model = ModelConfig.load(folder)
        return replace(self, folder=folder, model=model, checkpoint=Checkpoint(folder, model))


def open_machine(plan: Plan) -> Machine:
    """Opens the device and the checkpoint. Raises the same ``ChoraleError`` as an engine start."""
    config = plan.config
    folder = resolve_model(config.model, revision=config.revision, download_dir=config.download_dir)
    model = ModelConfig.load(folder)
    device = open_device(config.device, config.num_threads or default_threads(model.num_parameters))
    torch.set_float32_matmul_precision("highest")
    precision = cpu_precision(config, model)
    ops = select_ops(
        config.ops, str(device.torch_device), dense_experts=model.dense_experts, precision=precision
    )
    resolved = resolve(
        config,
        model,
        device.hardware,
        can_capture=device.can_capture and ops.capturable,
        supports_fp8_kv=ops.supports_fp8_kv,
        precision=precision if ops.name == "cpu" else None,
    )
    return Machine(
        plan=plan,
        folder=folder,
        model=model,
        checkpoint=Checkpoint(folder, model),
        device=device.torch_device,
        ops=with_compact(ops) if resolved.compact else ops,
        dtype=DTYPES[resolved.dtype],
        kv_dtype=DTYPES[resolved.kv_dtype],
        block_size=resolved.limits.block_size,
        max_model_len=resolved.limits.max_model_len,
        fp8_activations=config.moe_activation_dtype == "fp8",
        int8=ops.name == "cpu" and precision == "int8",
    )
