"""What a KV block's numbers can be, by vLLM's names, and why not the rest. Torch-free."""

from __future__ import annotations

from chorale.errors import ConfigError

E4M3 = "fp8_e4m3"
_SAME = {"fp8": E4M3}  # as in vLLM
_KNOWN = ("auto", "bfloat16", "float32", E4M3)
_WHY_NOT = {
    "fp8_e5m2": "two bits of mantissa are not enough, and its range is not needed",
    "fp8_inc": "that is for Intel Gaudi",
    "fp8_ds_mla": "that is for DeepSeek's attention",
    "fp8_per_token_head": "blocks keep no scales",
    "int8": "blocks keep no scales",
    "int8_per_token_head": "blocks keep no scales",
    "int4_per_token_head": "blocks keep no scales",
    "nvfp4": "blocks keep no scales",
    "float16": "gpt-oss runs in bfloat16 or float32",
}


def cache_dtype(name: str) -> str:
    """One of auto, bfloat16, float32, fp8_e4m3. Raises ``ConfigError`` that says why a name is none."""
    name = _SAME.get(name, name)
    if name in _KNOWN:
        return name
    why = _WHY_NOT.get(name, "no kernel here reads it" if name.startswith("turboquant") else "not known")
    raise ConfigError(f"--kv-cache-dtype {name}: {why}; use auto, bfloat16, float32 or fp8 (fp8_e4m3)")
