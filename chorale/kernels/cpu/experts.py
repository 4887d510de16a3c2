"""The expert layer of the CPU back end. MXFP4 weights are read in the file's format."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Sequence
from typing import Any

import torch

from chorale.errors import ConfigError
from chorale.kernels.cpu.library import BFLOAT16, FLOAT32, MXFP4, Experts, Matrix, library
from chorale.kernels.cpu.linear import readable
from chorale.kernels.ops import ExpertTensors, Precision


class CpuExperts:
    """One layer's experts."""

    def __init__(self, tensors: ExpertTensors, precision: Precision, ends: Sequence[int] = ()) -> None:
        """Prepare the weights. Products of dense experts are always exact. ``ends``: the last columns of the
        parts of ``parts``, whose results do not depend on the number of tokens."""
        if tensors.fp8_activations:
            raise ConfigError("--moe-activation-dtype fp8 needs --ops triton and a Hopper GPU")
        self._kept: list[torch.Tensor] = []  # keeps the memory that the library reads
        exact, self._fixed = precision == "exact", bool(ends)
        self.ends = tuple(ends)
        self._ends = (ctypes.c_int64 * len(ends))(*ends)
        if tensors.gate_up is not None and tensors.down is not None:
            gate_up = self._dense(tensors.gate_up, tensors.gate_up_bias)
            down = self._dense(tensors.down, tensors.down_bias)
        else:
            gate_up = self._mxfp4(tensors.gate_up_blocks, tensors.gate_up_scales, tensors.gate_up_bias, exact)
            down = self._mxfp4(tensors.down_blocks, tensors.down_scales, tensors.down_bias, exact)
        num_experts, self.hidden = tensors.down_bias.shape
        self.gate_up_bias, self.down_bias = tensors.gate_up_bias.float(), tensors.down_bias
        self.swiglu_limit, self.swiglu_alpha = limit, alpha = tensors.swiglu_limit, tensors.swiglu_alpha
        at = ctypes.addressof(self._ends) if ends else None
        self._experts = Experts(gate_up, down, num_experts, limit, alpha, at, len(ends))
        self._at = ctypes.addressof(self._experts)
        self._moe = library().functions.moe

    def _dense(self, weight: torch.Tensor, bias: torch.Tensor) -> Matrix:
        """weight [E, K, N], bias [E, N]."""
        rows = readable(weight.transpose(1, 2))
        element = BFLOAT16 if rows.dtype == torch.bfloat16 else FLOAT32
        return Matrix(self._keep(rows), None, self._keep(bias.float()), *rows.shape[1:], element, True)

    def _mxfp4(self, blocks: Any, scales: Any, bias: torch.Tensor, exact: bool) -> Matrix:
        """blocks [E, N, K / 32, 16], scales [E, N, K / 32], bias [E, N]."""
        if blocks is None or scales is None:
            raise ValueError("experts need either all four MXFP4 tensors or both dense ones")
        rows, columns = blocks.shape[1], blocks.shape[2] * 32
        kept = self._keep(blocks), self._keep(scales), self._keep(bias.float())
        return Matrix(*kept, rows, columns, MXFP4, exact, self._fixed)

    def _keep(self, tensor: torch.Tensor) -> int:
        self._kept.append(tensor.contiguous())
        return self._kept[-1].data_ptr()

    def up(self, expert: int, x: torch.Tensor) -> torch.Tensor:
        """[n, H] -> [n, 2 I] of one expert, before swiglu."""
        return self._multiply(self._experts.gate_up, expert, x)

    def back(self, expert: int, inner: torch.Tensor) -> torch.Tensor:
        """[n, I] -> [n, H]; with parts [P, n, H], the addends of ``parts``."""
        down, parts = self._experts.down, itertools.pairwise((0, *self.ends))
        if not self.ends:
            return self._multiply(down, expert, inner)
        return torch.stack([self._multiply(down, expert, inner[:, i:j], i) for i, j in parts])

    def _multiply(self, matrix: Matrix, expert: int, x: torch.Tensor, begin: int = 0) -> torch.Tensor:
        """Multiply by the columns from ``begin`` for which x has inputs; the first columns have the bias."""
        before = expert * matrix.rows * matrix.columns + begin  # weights
        sizes = {FLOAT32: 4 * before, BFLOAT16: 2 * before, MXFP4: before // 2}
        own = Matrix(
            matrix.data + sizes[matrix.element],
            matrix.scales and matrix.scales + before // 32,
            None if begin else matrix.bias + expert * matrix.rows * 4,
            matrix.rows, x.shape[1], matrix.element, matrix.exact, matrix.fixed, matrix.columns,
        )  # fmt: skip
        x = x.float().contiguous()
        out = x.new_empty(len(x), matrix.rows)
        library().functions.linear(x.data_ptr(), len(x), None, 0.0, ctypes.addressof(own), out.data_ptr(), 0)
        return out

    def __call__(
        self, normed: torch.Tensor, expert_ids: torch.Tensor, gates: torch.Tensor, x: torch.Tensor
    ) -> torch.Tensor:
        """Return x + sum of gate * expert(normed), in the order of expert ids; x [T, H] float32 is
        overwritten."""
        return self._add(normed, expert_ids, gates, x)

    def parts(self, normed: torch.Tensor, expert_ids: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
        """Return [P, T, H]: the addends of the parts of the columns, of which the first has the biases."""
        out = torch.zeros(len(self._ends), *normed.shape)
        return self._add(normed, expert_ids, gates, out)

    def _add(
        self, normed: torch.Tensor, expert_ids: torch.Tensor, gates: torch.Tensor, x: torch.Tensor
    ) -> torch.Tensor:
        tokens, top_k = expert_ids.shape
        self._moe(
            normed.data_ptr(), tokens, self.hidden, expert_ids.data_ptr(), gates.data_ptr(), top_k, self._at,
            x.data_ptr(),
        )  # fmt: skip
        return x
