"""``quantization_config`` of a checkpoint, and which kinds are supported. Torch-free.

``mxfp4`` is OpenAI's own. ``quark`` is what AMD's quantizer writes, and one of its kinds is read: MXFP4
weights of the experts and, for their inputs, one e4m3 scale a matrix (amd/gpt-oss-120b-w-mxfp4-a-fp8). Other
kinds are refused here, by the key that distinguishes them, before any weight is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from chorale.model.config_fields import Fields

_KEY = "quantization_config"
_WEIGHT = {"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "scale_format": "e8m0"}
_INPUT = {"dtype": "fp8_e4m3", "qscheme": "per_tensor", "is_dynamic": False}
# What would change how a tensor is read or a product computed, so that none of it may be set.
_UNREAD = ("layer_quant_config", "layer_type_quant_config", "kv_cache_quant_config", "softmax_quant_spec")


def read_quantization(fields: Fields) -> bool:
    """Returns whether experts have e4m3 input scales. Raises ``ModelConfigError`` for unsupported kinds."""
    value = fields.raw.get(_KEY)
    if value is None:
        return False
    method = value.get("quant_method") if isinstance(value, Mapping) else None
    if method == "quark":
        _check_quark(fields.section(_KEY))
        return True
    if method != "mxfp4":
        raise fields.error(
            f"{_KEY}.quant_method", f"{method!r}; known are mxfp4 and quark (MXFP4 weights, e4m3 inputs)"
        )
    return False


def quark_json(exclude: list[str]) -> dict[str, Any]:
    """Return the ``quantization_config`` of a checkpoint by quark."""
    return {
        "quant_method": "quark",
        "exclude": exclude,
        "export": {"pack_method": "reorder", "weight_format": "real_quantized"},
        "global_quant_config": {
            "weight": {**_WEIGHT, "is_dynamic": False},
            "input_tensors": dict(_INPUT),
            "output_tensors": None,
            "bias": None,
        },
        "layer_quant_config": {},
        "layer_type_quant_config": {},
        "kv_cache_quant_config": {},
    }


def _check_quark(quark: Fields) -> None:
    for key in _UNREAD:
        if quark.raw.get(key):
            raise quark.error(key, "is not read: of quark's checkpoints, those with one kind of experts are")
    common = quark.section("global_quant_config")
    for key, wanted in (("weight", _WEIGHT), ("input_tensors", _INPUT)):
        part = common.section(key)
        for name, expected in wanted.items():
            if part.raw.get(name) != expected:
                raise part.error(name, f"{part.raw.get(name)!r}; of quark's kinds, {expected!r} is read")
    for key in ("output_tensors", "bias"):
        if common.raw.get(key) is not None:
            raise common.error(key, "is quantized; only weights and inputs of the experts may be")
    export = quark.raw.get("export")
    weight_format = export.get("weight_format") if isinstance(export, Mapping) else None
    if weight_format not in (None, "real_quantized"):
        raise quark.error("export.weight_format", f"{weight_format!r} is not 'real_quantized'")
