"""Supported data types of the KV cache, by vLLM's names, and why others are refused. Torch-free."""

from __future__ import annotations

from chorale.errors import ConfigError

E4M3 = "fp8_e4m3"
_SAME = {"fp8": E4M3}  # as in vLLM
_KNOWN = ("auto", "bfloat16", "float32", E4M3)
_WHY_NOT = {
    "fp8_e5m2": "two bits of mantissa are not enough, and its range is not needed",
    "fp8_inc": "it is for Intel Gaudi",
    "fp8_ds_mla": "it is for DeepSeek's attention",
    "fp8_per_token_head": "blocks have no scales",
    "int8": "blocks have no scales",
    "int8_per_token_head": "blocks have no scales",
    "int4_per_token_head": "blocks have no scales",
    "nvfp4": "blocks have no scales",
    "float16": "gpt-oss runs in bfloat16 or float32",
}


def cache_dtype(name: str) -> str:
    """Return auto, bfloat16, float32 or fp8_e4m3. Raises ``ConfigError`` explaining why a name is
    unsupported."""
    name = _SAME.get(name, name)
    if name in _KNOWN:
        return name
    why = _WHY_NOT.get(name, "no kernel supports it" if name.startswith("turboquant") else "not known")
    raise ConfigError(f"--kv-cache-dtype {name}: {why}; use auto, bfloat16, float32 or fp8 (fp8_e4m3)")
