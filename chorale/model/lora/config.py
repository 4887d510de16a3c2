"""AdapterConfig: ``adapter_config.json`` of PEFT, checked.

A key that changes what the adapter computes must be one that is applied here; every other one is refused
by name unless its value asks for nothing. Source: peft 0.21, ``tuners/lora/config.py``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chorale.errors import AdapterError
from chorale.model.config import ModelConfig
from chorale.model.config_fields import Fields, read_json

FILE = "adapter_config.json"
MAX_RANK = 256
_MAX_BYTES = 2**20
# What was trained and how, which the tensors show or which has no effect on inference.
_IGNORED = frozenset({
    "auto_mapping", "base_model_name_or_path", "corda_config", "ensure_weight_tying", "eva_config",
    "exclude_modules", "inference_mode", "layers_pattern", "layers_to_transform", "loftq_config",
    "lora_dropout", "lora_ga_config", "megatron_core", "peft_version", "qalora_group_size", "revision",
    "runtime_config", "target_modules", "target_parameters", "task_type", "unsloth_fixed",
})  # fmt: skip
_APPLIED = frozenset({
    "alpha_pattern", "bias", "init_lora_weights", "lora_alpha", "lora_bias", "modules_to_save", "peft_type",
    "r", "rank_pattern", "use_rslora",
})  # fmt: skip
_NAMES = {
    "use_dora": "DoRA", "use_qalora": "QALoRA", "use_bdlora": "BD-LoRA", "arrow_config": "Arrow",
    "alora_invocation_tokens": "aLoRA", "kasa_config": "KaSA", "velora_config": "VeLoRA",
    "monteclora_config": "MonteCLoRA",
}  # fmt: skip
# Initialisations that change the base's weights.
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
_PLAIN = re.compile(r"\^?[\w.]{1,200}\$?")  # a pattern that is a name, not a regular expression
_PUBLISHED = re.compile(r"gpt-?oss(?:-safeguard)?-(20b|120b|puzzle-88b)", re.IGNORECASE)
_SIZES = {24: "20b", 36: "120b"}  # by the number of layers


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """Rank and scale of each module, and what the adapter must contain."""

    where: str
    rank: int
    alpha: float
    rank_pattern: Mapping[str, Any]
    alpha_pattern: Mapping[str, Any]
    use_rslora: bool
    saves_head: bool  # modules_to_save names lm_head
    in_each_layer: tuple[str, ...]  # attention modules that every layer must have
    peft_version: tuple[int, ...]  # (): unknown

    def check_rank(self, module: str, rank: int) -> None:
        """Raises ``AdapterError`` if a module's tensors have another rank than the configuration."""
        expected = _lookup(self.rank_pattern, module, self.rank)
        if rank != expected:
            raise AdapterError(f"{self.where}: {module} has rank {rank}, the configuration says {expected}")

    def scale(self, module: str, rank: int) -> float:
        alpha = _lookup(self.alpha_pattern, module, self.alpha)
        return float(alpha / (math.sqrt(rank) if self.use_rslora else rank))


def load_config(folder: Path, model: ModelConfig, max_rank: int = MAX_RANK) -> AdapterConfig:
    """Raises ``AdapterError`` naming the file and the key."""
    path = folder / FILE
    raw = read_json(path, _MAX_BYTES, AdapterError)
    if not isinstance(raw, dict):
        raise AdapterError(f"{path}: must hold a JSON object")
    _check_kind(path, raw)
    _check_base(path, raw.get("base_model_name_or_path"), model)
    fields = Fields(raw, str(path), AdapterError)
    ranks, alphas = (_pattern(path, raw, key) for key in ("rank_pattern", "alpha_pattern"))
    rank = fields.count("r")
    highest = max([rank, *ranks.values()])
    if highest > max_rank:
        raise AdapterError(f"{path}: rank {highest} is over the limit of {max_rank} (--max-lora-rank)")
    saved = raw.get("modules_to_save") or []
    if not isinstance(saved, list) or not set(map(str, saved)) <= {"lm_head"}:
        raise AdapterError(f"{path}: modules_to_save: only lm_head can be replaced, not {str(saved)[:200]}")
    return AdapterConfig(
        where=str(folder),
        rank=rank,
        alpha=fields.number("lora_alpha"),
        rank_pattern=ranks,
        alpha_pattern=alphas,
        use_rslora=raw.get("use_rslora") is True,
        saves_head=bool(saved),
        in_each_layer=_in_each_layer(raw),
        peft_version=tuple(
            int(part) for part in re.findall(r"\d{1,4}", str(raw.get("peft_version", ""))[:40])
        ),
    )


def _check_kind(path: Path, raw: Mapping[str, Any]) -> None:
    if raw.get("peft_type") != "LORA":
        raise AdapterError(f"{path}: peft_type {str(raw.get('peft_type'))[:40]!r}: only LORA is supported")
    if raw.get("bias", "none") != "none":
        raise AdapterError(
            f"{path}: bias {str(raw['bias'])[:40]!r}: trained biases of the base are not supported"
        )
    start = str(raw.get("init_lora_weights")).lower()
    if start.startswith(_CHANGES_BASE):
        raise AdapterError(
            f"{path}: init_lora_weights {start[:40]!r} changed the base's weights; convert the adapter first "
            "(save_pretrained with path_initial_model_for_weight_conversion)"
        )
    for key, value in raw.items():
        asks = value not in (None, False, [], {}, "")
        if asks and key in _NAMES:
            raise AdapterError(f"{path}: {key}: {_NAMES[key]} is not supported")
        if asks and key not in _IGNORED | _APPLIED:
            raise AdapterError(f"{path}: {key[:80]!r} is not supported")


def _check_base(path: Path, name: object, model: ModelConfig) -> None:
    """Refuse an adapter of the other published size: many of its tensors would fit."""
    found = _PUBLISHED.search(name.rpartition("/")[2]) if isinstance(name, str) else None
    size = "puzzle-88b" if model.layer_experts else _SIZES.get(model.num_hidden_layers)
    if found is not None and size not in (None, found[1].lower()):
        problem = f"this model has {model.num_hidden_layers} layers, as gpt-oss-{size}"
        raise AdapterError(f"{path}: the adapter was trained for {found[0]}; {problem}")


def _pattern(path: Path, raw: Mapping[str, Any], key: str) -> dict[str, Any]:
    found = raw.get(key) or {}
    if not isinstance(found, dict) or len(found) > 10_000:
        raise AdapterError(f"{path}: {key}: must be an object")
    for name, value in found.items():
        if not _PLAIN.fullmatch(name):
            raise AdapterError(
                f"{path}: {key}: {name[:80]!r} is a regular expression, which is not supported"
            )
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e6:
            raise AdapterError(f"{path}: {key}: {name}: must be a positive number")
    return {name.strip("^$"): value for name, value in found.items()}


def _lookup(pattern: Mapping[str, Any], module: str, default: float) -> Any:
    """The first pattern that is the end of the module's name, beginning at a dot, as in PEFT."""
    ends = (value for name, value in pattern.items() if f".{module}".endswith(f".{name}"))
    return next(ends, default)


def _in_each_layer(raw: Mapping[str, Any]) -> tuple[str, ...]:
    targets = raw.get("target_modules")
    if (
        raw.get("layers_to_transform") is not None
        or raw.get("exclude_modules")
        or not isinstance(targets, list)
    ):
        return ()
    return tuple(name for name in ("q_proj", "k_proj", "v_proj", "o_proj") if name in targets)
