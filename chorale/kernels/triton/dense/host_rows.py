"""Rows of a matrix in host memory, which a kernel reads over the bus: the input embedding of a GPU that has
little memory. The kernel finds addresses in a table on the device, and may run in a graph."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from chorale.errors import ConfigError
from chorale.kernels.triton.dense.norm import in_fours

_PIECE = 2**27  # bytes: PyTorch rounds pinned memory up to a power of two


@triton.jit
def _host_rows_kernel(
    address_ptr,  # [pieces] int64
    ids_ptr,  # [T] int64
    out_ptr,  # [T, H] float32
    H,
    per_piece,
    WIDE: tl.constexpr,  # rows are float32, not bfloat16
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    row = tl.load(ids_ptr + token)
    piece = row // per_piece
    address = tl.load(address_ptr + piece)
    place = address.to(tl.pointer_type(tl.float32 if WIDE else tl.bfloat16))
    columns = in_fours(BLOCK)
    x = tl.load(tl.multiple_of(place, 16) + (row - piece * per_piece) * H + columns, mask=columns < H)
    tl.store(out_ptr + token * H + columns, x.to(tl.float32), mask=columns < H)


@dataclass(frozen=True, slots=True)
class HostRows:
    """A matrix [N, H] bfloat16 or float32."""

    pieces: tuple[torch.Tensor, ...]  # [per_piece, H] each, the last one may be shorter; pinned
    addresses: torch.Tensor  # [pieces] int64, on the device

    def gather(self, ids: torch.Tensor) -> torch.Tensor:
        """ids [T] int64 -> their rows [T, H] float32."""
        per_piece, width = self.pieces[0].shape
        out = torch.empty(len(ids), width, dtype=torch.float32, device=ids.device)
        if len(ids):
            _host_rows_kernel[(len(ids),)](
                self.addresses, ids, out, width, per_piece,
                WIDE=self.pieces[0].dtype == torch.float32, BLOCK=triton.next_power_of_2(width),
            )  # fmt: skip
        return out


def pack_host_rows(matrix: torch.Tensor, device: torch.device) -> HostRows:
    """Copy a matrix [N, H], in host memory or meta, to memory that kernels of ``device`` read. Types other
    than bfloat16 become float32. Raises ``ConfigError`` if the system has too little memory."""
    dtype = torch.bfloat16 if matrix.dtype == torch.bfloat16 else torch.float32
    pieces = []
    for rows in matrix.split(max(1, _PIECE // (matrix.shape[1] * dtype.itemsize))):
        pinned = device.type == "cuda"
        try:
            piece = torch.empty(rows.shape, dtype=dtype, device=matrix.device, pin_memory=pinned)
        except RuntimeError as error:
            why = str(error).splitlines()[0]
            raise ConfigError(
                f"--cpu-offload-params: no pinned host memory for the weights: {why}"
            ) from error
        pieces.append(piece.copy_(rows))
    addresses = [0 if piece.is_meta else piece.data_ptr() for piece in pieces]
    return HostRows(tuple(pieces), torch.tensor(addresses, device=device))
