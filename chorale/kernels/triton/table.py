"""The table of measured shapes that is in use, if any. ``tuning.py`` asks it first; torch-free.

``chorale bench tune`` writes such a table and ``table_file.py`` reads it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

TOP_K = 4  # experts of a token in every gpt-oss


@dataclass(frozen=True, slots=True)
class Table:
    """``fields``: of ``ArchTuning``. ``steps``: by function of ``tuning.py`` and number of experts (0: any),
    the shapes up to a number of tokens, ascending. ``digest`` distinguishes tables."""

    fields: Mapping[str, Any] = field(default_factory=dict)
    steps: Mapping[tuple[str, int], tuple[tuple[int, Any], ...]] = field(default_factory=dict)
    digest: str = ""


EMPTY = Table()
_in_use = EMPTY


def use(table: Table) -> None:
    """Replaces the table; before kernels are chosen, as what was chosen is kept."""
    global _in_use
    _in_use = table


def in_use() -> Table:
    return _in_use


def shape_of(name: str, tokens: int, pairs_each: float | None = None) -> Any | None:
    """Returns the measured shape of a function of ``tuning.py``, or None. ``pairs_each``: of an expert."""
    experts = round(tokens * TOP_K / pairs_each) if pairs_each else 0
    steps = _in_use.steps.get((name, experts), ())
    return next((shape for most, shape in steps if tokens <= most), None)
