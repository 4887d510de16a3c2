"""Errors of results against exact ones, with their limits."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

from chorale.selfcheck.check import Failed

# Of a row: the norm of its error over its norm. In float32 both sides sum the same terms in another order; in
# bfloat16 a product of 2,880 terms is off by some 0.004, and a window that is one token too short by 0.09.
FLOAT32, BFLOAT16 = 1e-4, 0.02
BFLOAT16_EXPERTS = 0.04  # two products, and a sum in which experts may cancel each other
E4M3_CACHE = 0.06  # e4m3 keeps 3 bits of mantissa: a value is off by 0.06 at most
E4M3_EXPERTS = 0.1  # inputs of both products of an expert are e4m3


def limit_of(dtype: torch.dtype) -> float:
    return FLOAT32 if dtype == torch.float32 else BFLOAT16


def row_errors(found: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """[rows]: the norm of each row's error over the row's norm. Not finite where a result is not."""
    found, exact = found.float().flatten(1), exact.float().flatten(1)
    norms = exact.norm(dim=1)
    floor = 0.05 * norms.square().mean().sqrt()  # rows that happen to be nearly zero
    errors: torch.Tensor = (found - exact).norm(dim=1)
    errors /= norms.maximum(floor).clamp(min=1e-30)
    return errors


@dataclass(slots=True)
class Worst:
    """The worst error of one op, and where it was."""

    limit: float
    error: float = 0.0
    where: str = ""
    bad: list[str] = field(default_factory=list)  # layers above the limit


class ErrorTable:
    """Worst errors by op."""

    def __init__(self) -> None:
        self.worst: dict[str, Worst] = {}

    def add(self, op: str, where: str, found: torch.Tensor, exact: torch.Tensor, limit: float) -> None:
        self.note(op, where, float(row_errors(found, exact).nan_to_num(math.inf, math.inf).max()), limit)

    def note(self, op: str, where: str, error: float, limit: float) -> None:
        worst = self.worst.setdefault(op, Worst(limit))
        if error > worst.error or not worst.where:
            worst.error, worst.where = error, where
        place = where.split(",", 1)[0]
        if not error <= limit and place not in worst.bad:
            worst.bad.append(place)

    @property
    def facts(self) -> dict[str, object]:
        return {
            op: {"error": each.error, "limit": each.limit, "where": each.where}
            for op, each in self.worst.items()
        }

    def check(self) -> None:
        """Raises ``Failed`` if an error is above its limit."""
        wrong = [(op, each) for op, each in self.worst.items() if each.bad]
        if not wrong:
            return
        lines = []
        for op, each in wrong:
            others = len(each.bad) - 1
            more = f" (and at {others} other place{'s' if others > 1 else ''})" if others else ""
            lines.append(f"{op} is off by {each.error:.2g} (limit {each.limit:g}) at {each.where}{more}")
        raise Failed("; ".join(lines), self.facts)
