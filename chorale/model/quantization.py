"""Reads ``quantization_config`` of a checkpoint and refuses unsupported kinds. Torch-free.

``mxfp4`` is OpenAI's kind. ``quark`` is written by AMD's quantizer; one form is supported: MXFP4 weights of
the experts with one e4m3 input scale per matrix (amd/gpt-oss-120b-w-mxfp4-a-fp8). Other forms are refused
before any weight is read, with the key that differs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from chorale.model.config_fields import Fields

_KEY = "quantization_config"
_WEIGHT = {"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "scale_format": "e8m0"}
_INPUT = {"dtype": "fp8_e4m3", "qscheme": "per_tensor", "is_dynamic": False}
# Options that would change how tensors are read or products are computed. None of them may be set.
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
            f"{_KEY}.quant_method", f"{method!r}; supported are mxfp4 and quark (MXFP4 weights, e4m3 inputs)"
        )
    return False


def quark_json(exclude: list[str]) -> dict[str, Any]:
    """Return the ``quantization_config`` of a quark checkpoint."""
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
            raise quark.error(key, "must be empty: only MXFP4 experts with e4m3 inputs are supported")
    common = quark.section("global_quant_config")
    for key, wanted in (("weight", _WEIGHT), ("input_tensors", _INPUT)):
        part = common.section(key)
        for name, expected in wanted.items():
            if part.raw.get(name) != expected:
                raise part.error(name, f"{part.raw.get(name)!r}; only {expected!r} is supported")
    for key in ("output_tensors", "bias"):
        if common.raw.get(key) is not None:
            raise common.error(key, "is quantized; only weights and inputs of the experts may be")
    export = quark.raw.get("export")
    weight_format = export.get("weight_format") if isinstance(export, Mapping) else None
    if weight_format not in (None, "real_quantized"):
        raise quark.error("export.weight_format", f"{weight_format!r} is not 'real_quantized'")
