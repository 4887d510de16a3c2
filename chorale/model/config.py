"""ModelConfig: the sizes and constants of one gpt-oss checkpoint, read from its folder and checked.

Torch-free, so that the CLI can check what fits before torch is imported. Two forms of ``config.json`` are
read: the published one (``GptOssForCausalLM``, with the older ``rope_scaling`` or the newer
``rope_parameters``) and that of the reference layout under ``original/``. ``GptOssPuzzleForCausalLM``
(nvidia/gpt-oss-puzzle-88B) is the published form with ``block_configs``: experts and window of each layer.
Every fault is a ``ModelConfigError`` that names the key.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from chorale.config.sampling_fields import GENERATION, SAMPLING_FIELDS
from chorale.errors import ModelConfigError
from chorale.model.config_fields import Fields, read_json_object
from chorale.model.quantization import read_quantization
from chorale.parallel.shares import Share

FULL, WINDOW = 0, 1  # the values of engine.types.CacheGroup, which this package must not import
MXFP4_GROUP = 32  # weights that share one scale

_EOS_OF_GPT_OSS = (200002, 199999, 200012)  # <|return|>, <|endoftext|>, <|call|>
_MAX_LAYERS = 4096  # gpt-oss has 24 or 36; bounds the objects made per layer before any file is read
_LAYER_GROUPS = {"full_attention": FULL, "sliding_attention": WINDOW}
_CLASSES = {"gpt_oss": "GptOssForCausalLM", "gpt_oss_puzzle": "GptOssPuzzleForCausalLM"}  # by model_type
MODEL_TYPES = tuple(_CLASSES)


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """YaRN ("NTK by parts") constants. ``factor`` 1 is plain RoPE."""

    theta: float = 150000.0
    factor: float = 32.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    original_max_position: int = 4096
    truncate: bool = False  # round the ends of the ramp to whole dimensions; gpt-oss does not
    attention_factor: float | None = None  # None: 0.1 ln(factor) + 1

    @property
    def concentration(self) -> float:
        """The factor on cos and sin (scores are multiplied by its square)."""
        if self.attention_factor is not None:
            return self.attention_factor
        return 1.0 if self.factor <= 1.0 else 0.1 * math.log(self.factor) + 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Sizes are counts of elements. Instances from ``load`` are consistent; see ``_check_sizes``."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    num_local_experts: int  # of the layers that have the most
    num_experts_per_tok: int
    vocab_size: int
    sliding_window: int
    layer_types: tuple[str, ...]  # the layers' cache groups; sliding_attention layers see sliding_window
    rope: RopeConfig
    # gpt_oss_puzzle: experts of each layer, and tokens that it sees (0: all). Empty: the same in every layer,
    # and full_attention layers see all.
    layer_experts: tuple[int, ...] = ()
    layer_windows: tuple[int, ...] = ()
    # Powers of two by which each layer's (keys, values) are divided in an e4m3 cache; empty: 1.
    kv_scales: tuple[tuple[float, float], ...] = ()
    rms_norm_eps: float = 1e-5
    swiglu_limit: float = 7.0
    swiglu_alpha: float = 1.702
    max_position_embeddings: int = 131072
    eos_token_ids: tuple[int, ...] = _EOS_OF_GPT_OSS
    # Experts have the dtype of the other weights instead of MXFP4: a conversion without quantization_config.
    dense_experts: bool = False
    expert_input_scales: bool = False  # scales for e4m3 inputs of the experts (``quantization.py``)
    # The fields that generation_config.json has, by vLLM's names.
    default_sampling: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def load(cls, folder: str | Path) -> ModelConfig:
        """Read ``folder/config.json`` (or ``original/config.json``) and ``generation_config.json``.

        Raises ``ModelConfigError``, naming the file and the key.
        """
        path = _find_config(Path(folder))
        generation = Path(folder) / "generation_config.json"
        return cls.from_dict(
            read_json_object(path),
            # A broken link (a blob removed from the hub's cache) differs from a missing file.
            generation=read_json_object(generation) if os.path.lexists(generation) else {},
            where=str(path),
        )

    @classmethod
    def from_dict(
        cls,
        raw: Mapping[str, Any],
        *,
        generation: Mapping[str, Any] | None = None,
        where: str = "config.json",
    ) -> ModelConfig:
        """Like ``load``, from parsed JSON. ``where`` names the source in errors."""
        fields = Fields(raw, where)
        _check_architecture(fields)
        layers = fields.count("num_hidden_layers")
        kinds, blocks = _read_layer_types(fields, layers), _read_blocks(fields, layers)
        experts, windows = (tuple(part) for part in zip(*blocks, strict=True)) if blocks else ((), ())
        short = min(filter(None, windows), default=1)
        if blocks:
            kinds = tuple("sliding_attention" if window == short else "full_attention" for window in windows)
        config = cls(
            hidden_size=fields.count("hidden_size"),
            intermediate_size=fields.count("intermediate_size"),
            num_hidden_layers=layers,
            num_attention_heads=fields.count("num_attention_heads"),
            num_key_value_heads=fields.count("num_key_value_heads"),
            head_dim=fields.count("head_dim"),
            num_local_experts=max(experts) if blocks else fields.count("num_local_experts", "num_experts"),
            layer_experts=experts,
            layer_windows=windows,
            num_experts_per_tok=fields.count("num_experts_per_tok", "experts_per_token"),
            vocab_size=fields.count("vocab_size"),
            sliding_window=short if blocks else fields.count("sliding_window"),
            layer_types=kinds,
            rope=(rope := _read_rope(fields)),
            rms_norm_eps=fields.number("rms_norm_eps", default=1e-5),
            swiglu_limit=fields.number("swiglu_limit", default=7.0),
            swiglu_alpha=fields.number("swiglu_alpha", default=1.702),
            max_position_embeddings=fields.count(
                "max_position_embeddings", default=round(rope.original_max_position * max(rope.factor, 1.0))
            ),
            eos_token_ids=_read_eos(fields, generation or {}),
            # The reference layout's config.json has no quantization_config either, but it has num_experts.
            dense_experts="quantization_config" not in raw and bool(blocks or "num_local_experts" in raw),
            expert_input_scales=read_quantization(fields),
            default_sampling=_read_sampling(generation or {}),
        )
        _check_sizes(config, fields)
        return config

    def part(self, share: Share) -> ModelConfig:
        """Return the sizes of the part that a rank with ``share`` allocates and computes."""
        return replace(
            self,
            num_attention_heads=len(share.heads),
            num_key_value_heads=len(share.kv_heads),
            intermediate_size=len(share.columns),
            num_local_experts=len(share.experts),
            vocab_size=len(share.vocabulary),
        )

    def only(self, layer: int) -> ModelConfig:
        """Return the configuration of a model that has just this layer."""
        one = slice(layer, layer + 1)
        return replace(
            self,
            num_hidden_layers=1,
            layer_types=self.layer_types[one],
            layer_experts=self.layer_experts[one],
            layer_windows=self.layer_windows[one],
        )

    def experts_in(self, layer: int) -> int:
        """Return a layer's number of experts."""
        return self.layer_experts[layer] if self.layer_experts else self.num_local_experts

    @property
    def full_windows(self) -> tuple[int, ...]:
        """The windows of layers of the full group, all of whose keys and values are kept; the first is 0,
        which is none."""
        pairs = zip(self.layer_types, self.layer_windows, strict=bool(self.layer_windows))
        return tuple(sorted({0, *(window for kind, window in pairs if kind == "full_attention")}))

    def kv_factor(self, layer: int, part: str) -> float:
        """Return the factor of a projection's weights (q, k, v or output) that applies ``kv_scales``: scores
        and sums of values stay the same."""
        if not self.kv_scales:
            return 1.0
        key, value = self.kv_scales[layer]
        return {"q": key, "k": 1 / key, "v": 1 / value, "output": value}[part]

    def place_of(self, layer: int) -> tuple[int, int, int]:
        """Return (cache group, index of the KV tensor, index in ``full_windows``) of a layer: the i-th layer
        of its group uses the i-th tensor.

        Both groups share the tensors: they own different block ids, so layer 0 (window) and layer 1 (full)
        can both use tensor 0.
        """
        kind = self.layer_types[layer]
        window = self.layer_windows[layer] if self.layer_windows and kind == "full_attention" else 0
        return _LAYER_GROUPS[kind], self.layer_types[:layer].count(kind), self.full_windows.index(window)

    @property
    def num_kv_tensors(self) -> int:
        """Number of KV tensors that a worker allocates: the layers of the larger group."""
        return max(self.layer_types.count(kind) for kind in _LAYER_GROUPS)

    @property
    def num_expert_parameters(self) -> int:
        """Number of weights of all experts of all layers, without biases."""
        return self._num_experts * 3 * self.hidden_size * self.intermediate_size

    @property
    def _num_experts(self) -> int:
        """Number of experts of all layers."""
        return sum(self.layer_experts) or self.num_hidden_layers * self.num_local_experts

    @property
    def num_parameters(self) -> int:
        heads = self.num_attention_heads + 2 * self.num_key_value_heads
        hidden, inter = self.hidden_size, self.intermediate_size
        attention = (hidden + 1) * heads * self.head_dim + self.num_attention_heads
        attention += hidden * self.num_attention_heads * self.head_dim + hidden
        expert = hidden + 1 + 2 * inter + hidden  # its row of the router, its biases
        dense = self.num_hidden_layers * (attention + 2 * hidden) + self._num_experts * expert
        return dense + 2 * self.vocab_size * hidden + hidden + self.num_expert_parameters


def _find_config(folder: Path) -> Path:
    for candidate in (folder / "config.json", folder / "original" / "config.json"):
        if candidate.is_file():
            return candidate
    raise ModelConfigError(f"{folder / 'config.json'}: no such file; a gpt-oss checkpoint has one")


def _check_architecture(fields: Fields) -> None:
    model_type = fields.raw.get("model_type", "gpt_oss")  # absent in original/config.json
    if model_type not in MODEL_TYPES:
        raise fields.error("model_type", f"{model_type!r} is not gpt_oss, the only architecture served")
    architectures, wanted_class = fields.raw.get("architectures"), _CLASSES[model_type]
    if architectures is not None and architectures != [wanted_class]:
        raise fields.error("architectures", f"{architectures!r} is not {[wanted_class]}")
    activation = fields.raw.get("hidden_act", "silu")
    if activation != "silu":
        raise fields.error("hidden_act", f"{activation!r}; gpt-oss experts use silu (clamped SwiGLU)")
    for key, wanted in (("tie_word_embeddings", False), ("attention_bias", True)):
        if fields.raw.get(key, wanted) is not wanted:
            raise fields.error(key, f"must be {str(wanted).lower()} for gpt-oss")


def _read_layer_types(fields: Fields, layers: int) -> tuple[str, ...]:
    """Read the layers' cache groups. If absent (the reference layout), even layers are windowed."""
    value = fields.raw.get("layer_types")
    if layers > _MAX_LAYERS:
        raise fields.error("num_hidden_layers", f"{layers} is more than {_MAX_LAYERS}")
    if value is None:
        return tuple("full_attention" if i % 2 else "sliding_attention" for i in range(layers))
    if not isinstance(value, list) or len(value) != layers:
        raise fields.error("layer_types", f"must list one kind for each of the {layers} layers")
    for i, kind in enumerate(value):
        if not isinstance(kind, str) or kind not in _LAYER_GROUPS:
            raise fields.error(f"layer_types[{i}]", f"{kind!r} is not one of {sorted(_LAYER_GROUPS)}")
    return tuple(value)


def _read_blocks(fields: Fields, layers: int) -> list[tuple[int, int]]:
    """Read (experts, window or 0) of each layer of gpt_oss_puzzle; empty for gpt_oss."""
    if fields.raw.get("model_type") != "gpt_oss_puzzle":
        return []
    blocks = fields.raw.get("block_configs")
    if not isinstance(blocks, list) or len(blocks) != layers:
        raise fields.error("block_configs", f"must list the sizes of each of the {layers} layers")
    found, kinds = [], fields.raw.get("layer_types")
    for i, raw in enumerate(blocks):
        name = f"block_configs[{i}]"
        if not isinstance(raw, Mapping) or "sliding_window" not in raw:
            raise fields.error(name, "must have num_local_experts and sliding_window (null: no window)")
        for key, value in raw.items():
            is_own = key in ("num_local_experts", "sliding_window")
            if not is_own and value not in (None, fields.raw.get(key)):
                raise fields.error(
                    f"{name}.{key[:80]}", "differs from the other layers, which is not supported"
                )
        block = Fields(raw, f"{fields.where}: {name}")
        window = 0 if raw["sliding_window"] is None else block.count("sliding_window")
        if kinds is not None and (kinds[i] == "sliding_attention") is not (window > 0):
            raise fields.error(
                f"layer_types[{i}]", f"{kinds[i]}, but the window of {name} is {window or None}"
            )
        found.append((block.count("num_local_experts"), window))
    return found


def _read_rope(fields: Fields) -> RopeConfig:
    """Read the RoPE constants: ``rope_parameters``, ``rope_scaling`` + ``rope_theta``, or the reference's
    keys."""
    if "rope_scaling_factor" in fields.raw:
        return RopeConfig(
            theta=fields.number("rope_theta"),
            factor=fields.number("rope_scaling_factor"),
            beta_fast=fields.number("rope_ntk_beta", default=32.0),
            beta_slow=fields.number("rope_ntk_alpha", default=1.0),
            original_max_position=fields.count("initial_context_length", default=4096),
        )
    key = "rope_parameters" if fields.raw.get("rope_parameters") is not None else "rope_scaling"
    rope = fields.section(key)
    kind = rope.raw.get("rope_type", rope.raw.get("type"))
    theta = rope.number("rope_theta") if "rope_theta" in rope.raw else fields.number("rope_theta")
    if kind != "yarn":
        raise rope.error("rope_type", f"{kind!r} is not 'yarn', which gpt-oss uses")
    if rope.raw.get("partial_rotary_factor", 1) not in (None, 1):
        raise rope.error("partial_rotary_factor", "must be 1: gpt-oss rotates whole heads")
    return read_yarn(rope, theta, rope.count("original_max_position_embeddings"))


def read_yarn(rope: Fields, theta: float, original_max_position: int) -> RopeConfig:
    """Read the other constants of RoPE of type yarn."""
    truncate = rope.raw.get("truncate", True)  # true if absent in the published form
    if not isinstance(truncate, bool):
        raise rope.error("truncate", "must be true or false")
    explicit = rope.raw.get("attention_factor")
    if explicit is None and rope.raw.get("mscale") and rope.raw.get("mscale_all_dim"):
        raise rope.error("mscale", "is not supported; attention_factor is")
    return RopeConfig(
        theta=theta,
        factor=rope.number("factor"),
        beta_fast=rope.number("beta_fast", default=32.0),
        beta_slow=rope.number("beta_slow", default=1.0),
        original_max_position=original_max_position,
        truncate=truncate,
        attention_factor=None if explicit is None else rope.number("attention_factor"),
    )


def _read_eos(fields: Fields, generation: Mapping[str, Any]) -> tuple[int, ...]:
    """Read the stop ids: from generation_config.json (it lists <|call|> too), config.json, or gpt-oss's
    defaults."""
    is_puzzle = "block_configs" in fields.raw
    if generation.get("eos_token_id") is not None:
        fields = Fields(generation, "generation_config.json")
    value = fields.raw.get("eos_token_id")
    if value is None:
        return _EOS_OF_GPT_OSS
    ids = value if isinstance(value, list) else [value]
    if not ids or not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
        raise fields.error("eos_token_id", "must be a token id or a list of them")
    # nvidia/gpt-oss-puzzle-88B lists only some of the tokens with which gpt-oss ends.
    more = _EOS_OF_GPT_OSS if is_puzzle else ()
    return tuple(dict.fromkeys([*ids, *more]))


def _read_sampling(generation: Mapping[str, Any]) -> dict[str, float]:
    numbers = Fields(generation, "generation_config.json")
    return {
        name: numbers.within(name, SAMPLING_FIELDS[field].llm_range)
        for name, field in GENERATION.items()
        if generation.get(name) is not None
    }


def _check_sizes(config: ModelConfig, fields: Fields) -> None:
    """Check the sizes that the ops rely on. ``resolve`` drops end-of-sequence ids above the vocabulary."""
    if config.num_attention_heads % config.num_key_value_heads:
        raise fields.error(
            "num_key_value_heads", f"must divide num_attention_heads {config.num_attention_heads}"
        )
    if config.head_dim % 2:
        raise fields.error("head_dim", "must be even: rotary embedding rotates pairs")
    for key in ("hidden_size", "intermediate_size"):
        if getattr(config, key) % MXFP4_GROUP:
            raise fields.error(
                key, f"must be a multiple of {MXFP4_GROUP}, the weights that share an MXFP4 scale"
            )
    fewest = min(config.layer_experts, default=config.num_local_experts)
    if config.num_experts_per_tok > fewest:
        raise fields.error("num_experts_per_tok", f"is more than num_local_experts {fewest}")
    if config.layer_experts and config.expert_input_scales:
        raise fields.error("quantization_config", "of gpt_oss_puzzle must be mxfp4")
    rope = config.rope
    if rope.factor < 1.0:
        raise fields.error("rope_scaling.factor", "must be 1 or more")
    if rope.theta <= 1.0:
        raise fields.error("rope_theta", "must be more than 1")
    if rope.beta_fast <= rope.beta_slow:
        raise fields.error("rope_scaling.beta_fast", "must be more than beta_slow")
