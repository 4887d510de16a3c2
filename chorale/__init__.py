"""Chorale: a serving engine made for gpt-oss-20b and gpt-oss-120b.

The public names are ``LLM``, ``SamplingParams`` and ``EngineConfig``. They are imported when first used, so
that ``import chorale`` costs nothing and touches no device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from chorale.version import __version__

if TYPE_CHECKING:
    from chorale.config.engine import EngineConfig
    from chorale.llm import LLM, SamplingParams

__all__ = ["LLM", "EngineConfig", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    if name in ("LLM", "SamplingParams"):
        from chorale import llm

        return getattr(llm, name)
    if name == "EngineConfig":
        from chorale.config.engine import EngineConfig

        return EngineConfig
    raise AttributeError(f"module 'chorale' has no attribute {name!r}")
