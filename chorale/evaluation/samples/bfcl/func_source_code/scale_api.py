"""An API without state, of our own making."""

from __future__ import annotations


class ScaleAPI:
    """Converts weights."""

    def to_grams(self, pounds: float) -> dict[str, float]:
        """Converts pounds to grams."""
        return {"grams": round(pounds * 453.59237, 2)}

    def total(self, weights: list[float]) -> float:
        """Adds weights."""
        return sum(weights)
