"""Chorale: a serving engine made for gpt-oss-20b and gpt-oss-120b.

The public names are those in ``__all__``. They are imported when first used, so that ``import chorale`` costs
nothing and touches no device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from chorale.version import __version__

if TYPE_CHECKING:
    from chorale.config.engine import EngineConfig
    from chorale.errors import ChoraleError
    from chorale.llm import (
        LLM,
        CompletionOutput,
        LoRARequest,
        RequestOutput,
        SamplingParams,
        StructuredOutputsParams,
    )

__all__ = [
    "LLM",
    "ChoraleError",
    "CompletionOutput",
    "EngineConfig",
    "LoRARequest",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputsParams",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name == "EngineConfig":
        from chorale.config.engine import EngineConfig

        return EngineConfig
    if name == "ChoraleError":
        from chorale.errors import ChoraleError

        return ChoraleError
    if name in __all__:
        from chorale import llm

        return getattr(llm, name)
    raise AttributeError(f"module 'chorale' has no attribute {name!r}")
