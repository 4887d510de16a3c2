"""Dense matrices of the CPU back end."""

from __future__ import annotations

import ctypes

import torch

from chorale.kernels.cpu.library import BFLOAT16, FLOAT32, INT8, Matrix, library
from chorale.kernels.ops import Precision


class CpuLinear:
    """y = x W^T + bias for W [N, K]. int8: weights and inputs have one scale per block of 32."""

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None, precision: Precision, *, fixed: bool = False
    ) -> None:
        """``weight`` may be a view of a mapped file; it is kept if ``precision`` is exact. ``fixed``: a
        token's result does not depend on the number of tokens."""
        self.rows, self.columns = weight.shape
        self.bias = None if bias is None else bias.float().contiguous()
        weight = readable(weight)
        element = BFLOAT16 if weight.dtype == torch.bfloat16 else FLOAT32
        if precision == "int8":
            weight, element = self._rounded(weight, element), INT8
        self.weight = weight
        bias_at = None if self.bias is None else self.bias.data_ptr()
        exact = precision == "exact"
        self.matrix = Matrix(weight.data_ptr(), None, bias_at, self.rows, self.columns, element, exact, fixed)
        self._at = ctypes.addressof(self.matrix)
        self._linear = library().functions.linear

    def _rounded(self, weight: torch.Tensor, element: int) -> torch.Tensor:
        functions = library().functions
        packed = torch.empty(self.rows, functions.packed_bytes(self.columns), dtype=torch.uint8)
        functions.pack(weight.data_ptr(), element, self.rows, self.columns, packed.data_ptr())
        return packed

    def __call__(self, x: torch.Tensor, norm: torch.Tensor | None = None, eps: float = 0.0) -> torch.Tensor:
        """Multiply x, normed if there is a norm: [T, K] float32 -> [T, N] float32."""
        x = x.float().contiguous()
        out = x.new_empty(len(x), self.rows)
        weight = None if norm is None else norm.data_ptr()
        self._linear(x.data_ptr(), len(x), weight, eps, self._at, out.data_ptr(), 0)
        return out

    def add_to(self, out: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Adds the product to ``out`` [T, N] and returns it."""
        x = x.float().contiguous()
        self._linear(x.data_ptr(), len(x), None, 0.0, self._at, out.data_ptr(), 1)
        return out


def readable(weight: torch.Tensor) -> torch.Tensor:
    """Returns the tensor in a type that the library supports, without a copy if possible."""
    kept = weight.dtype in (torch.bfloat16, torch.float32)
    return (weight if kept else weight.float()).contiguous()
