"""A checkpoint's parameters in float32, layer by layer, read apart from the engine's loader.

Experts are decoded one at a time, when they are asked for, so that a layer needs the memory of its packed
tensors and of one expert.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from chorale.model.checkpoint import Checkpoint
from chorale.model.config import ModelConfig

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass(frozen=True, slots=True)
class Product:
    weight: torch.Tensor  # [N, K] float32
    bias: torch.Tensor  # [N]


class PlainLayer:
    """The parameters of one layer. Attributes are float32."""

    def __init__(self, source: PlainWeights, number: int) -> None:
        self._source, self._number = source, number
        self._packed: dict[str, torch.Tensor] = {}
        self.attention_norm = self._read("attention_norm")
        self.qkv_weight, self.qkv_bias = self._qkv("weight"), self._qkv("bias")
        self.sinks = self._read("sinks")
        self.output_weight, self.output_bias = self._read("output.weight"), self._read("output.bias")
        self.expert_norm = self._read("expert_norm")
        self.router_weight, self.router_bias = self._read("router.weight"), self._read("router.bias")

    def _read(self, role: str) -> torch.Tensor:
        return self._source.read(self._number, role).float()

    def _qkv(self, part: str) -> torch.Tensor:
        if self._source.has(self._number, f"qkv.{part}"):
            return self._read(f"qkv.{part}")
        return torch.cat([self._read(f"{name}.{part}") for name in "qkv"])

    def expert(self, expert: int) -> tuple[Product, Product]:
        """The first and the second product of an expert. Rows of the first alternate gate and up."""
        return self._product("gate_up", expert), self._product("down", expert)

    def _product(self, name: str, expert: int) -> Product:
        bias = self._of(f"{name}.bias", expert).float()
        if self._source.has(self._number, f"{name}.dense"):
            return Product(self._of(f"{name}.dense", expert).float().t(), bias)
        return Product(decode(self._of(f"{name}.blocks", expert), self._of(f"{name}.scales", expert)), bias)

    def _of(self, role: str, expert: int) -> torch.Tensor:
        if self._source.has(self._number, f"{role}/{expert}"):
            return self._source.read(self._number, f"{role}/{expert}")
        if role not in self._packed:  # of all experts: moved to the device at once
            self._packed[role] = self._source.read(self._number, role)
        return self._packed[role][expert]


class PlainWeights:
    """A checkpoint whose tensors are read to ``device``, in the file's dtype."""

    def __init__(self, checkpoint: Checkpoint, config: ModelConfig, device: torch.device) -> None:
        self._checkpoint, self._config, self._device = checkpoint, config, device

    def has(self, layer: int | None, role: str) -> bool:
        return self._checkpoint.has(layer, role)

    def read(self, layer: int | None, role: str) -> torch.Tensor:
        return self._checkpoint.read(layer, role).to(self._device)

    def layers(self) -> Iterator[PlainLayer]:
        """The layers in order. One is released before the next is read, unless the caller keeps it."""
        for number in range(self._config.num_hidden_layers):
            yield PlainLayer(self, number)

    def embedded(self, token_ids: list[int]) -> torch.Tensor:
        rows = self._checkpoint.read(None, "embedding")[torch.tensor(token_ids)]
        return rows.float().to(self._device)


def decode(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """MXFP4: blocks [N, G, 16] (or [N, G * 16]) and scales [N, G], bytes -> [N, G * 32] float32.

    The low half of a byte comes first; a scale byte s multiplies its 32 weights by 2^(s - 127).
    """
    rows, groups = scales.shape
    octets = blocks.reshape(rows, groups * 16)
    both = torch.tensor([*_E2M1, *(-value for value in _E2M1)], device=blocks.device)
    byte = torch.arange(256, device=blocks.device)
    pairs = torch.stack((both[byte & 15], both[byte >> 4]), 1)  # [256, 2]
    values = pairs.index_select(0, octets.reshape(-1).int()).view(rows, groups, 32)
    powers = torch.exp2(scales.double() - 127).float()  # exact, subnormal ones included
    powers[scales == 255] = torch.nan
    return values.mul_(powers.unsqueeze(-1)).view(rows, groups * 32)
