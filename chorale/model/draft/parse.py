"""Reads a ``HeadConfig`` from ``config.json``, in the format of speculators or of NVIDIA and SpecForge.

The first nests the sizes in ``transformer_layer_config``; the second has them at the top level and may nest
the switches in ``eagle_config`` (DFlash: ``dflash_config``). Absent switches are inferred from the tensors
where possible. Heads that this engine would compute differently than they were trained are refused.
Torch-free.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from chorale.model.config import ModelConfig, RopeConfig, read_yarn
from chorale.model.config_fields import Fields
from chorale.model.draft.aux import KEY, boundaries_of, boundaries_of_dflash
from chorale.model.draft.config import MOST_LAYERS, HeadConfig, Llama3Rope
from chorale.model.draft.kinds import kind_of

_SIZES = {"20b": 24, "120b": 36}  # number of layers


def read_head_config(
    raw: Mapping[str, Any], where: str, target: ModelConfig, *, names: Collection[str] | None = None
) -> HeadConfig:
    """``names``: the tensors' names, as ``files.py`` spells them; None: not known yet. Raises
    ``ModelConfigError``."""
    return _Reader(raw, where, target, names).config()


class _Reader:
    def __init__(
        self, raw: Mapping[str, Any], where: str, target: ModelConfig, names: Collection[str] | None
    ) -> None:
        self._top, self._target, self._names = Fields(raw, where), target, names
        self._kind = kind_of(self._top, names or ())
        self._is_speculators = "speculators_model_type" in raw or "transformer_layer_config" in raw
        self._layer = self._top.section("transformer_layer_config") if self._is_speculators else self._top
        section = "dflash_config" if self._kind == "dflash" else "eagle_config"
        self._nested = self._top.section(section) if isinstance(raw.get(section), Mapping) else self._top

    def config(self) -> HeadConfig:
        layer, target = self._layer, self._target
        self._check()
        hidden, heads = layer.count("hidden_size"), layer.count("num_attention_heads")
        vocab = layer.count("vocab_size", default=target.vocab_size)
        aux, source = self._aux()
        is_dflash, has_size = self._kind == "dflash", self._top.raw.get("block_size") is not None
        return HeadConfig(
            hidden_size=hidden,
            target_hidden_size=self._target_hidden(hidden),
            num_attention_heads=heads,
            num_key_value_heads=self._kv_heads(heads),
            head_dim=self._head_dim(hidden, heads),
            intermediate_size=layer.count("intermediate_size"),
            vocab_size=self._same("vocab_size", vocab, target.vocab_size, layer),
            draft_vocab_size=self._draft_vocab(vocab),
            aux_boundaries=aux,
            aux_source=source,
            kind=self._kind,
            num_layers=self._num_layers(),
            mask_token=0 if self._kind == "eagle3" else self._mask_token(vocab),
            most_drafts=self._top.count("block_size") if is_dflash and has_size else None,
            rope=read_rope(layer, 1_000_000.0 if is_dflash else 10_000.0),
            rms_norm_eps=layer.number("rms_norm_eps", default=1e-6),
            norm_before_residual=self._switch(
                "norm_before_residual", default=self._is_speculators and self._kind == "eagle3"
            ),
            norm_before_fc=not is_dflash and self._switch("norm_before_fc", "input_norm.weight"),
            aux_norms=not is_dflash and self._switch("fc_norm", "fc_norm.0.weight"),
            norm_output=self._switch("norm_output"),
            max_position_embeddings=layer.count("max_position_embeddings", default=2048),
        )

    def _check(self) -> None:
        """Refuse unsupported features, and heads of the other gpt-oss size."""
        layer, nested = self._layer, self._nested
        layers, is_dflash = self._num_layers(), self._kind == "dflash"
        if layers > MOST_LAYERS or (layers > 1 and self._kind == "eagle3"):
            problem = f"{layers}: EAGLE3 heads have one layer, others at most {MOST_LAYERS}"
            raise layer.error("num_hidden_layers", problem)
        if layer.raw.get("hidden_act", "silu") != "silu":
            raise layer.error("hidden_act", f"{layer.raw['hidden_act']!r} is not silu")
        wrong = {"mlp_bias": True, "is_causal": is_dflash}
        wrong |= {} if is_dflash else {"tie_word_embeddings": True}  # a DFlash head has no such tensors
        for key, value in wrong.items():
            if layer.raw.get(key) is value or self._top.raw.get(key) is value:
                raise layer.error(key, f"{str(value).lower()} is not supported")
        kinds, windowed = layer.raw.get("layer_types"), layer.raw.get("use_sliding_window")
        if kinds not in (None, ["full_attention"] * layers) or windowed:
            raise layer.error("layer_types", "must be full_attention: the head sees all positions")
        if self._top.raw.get("quantization_config") is not None:
            raise self._top.error("quantization_config", "quantized heads are not supported")
        if layer.raw.get("logit_scale") not in (None, 1, 1.0):
            raise layer.error("logit_scale", "must be 1")
        for key, needed in (
            ("use_input_layernorm_in_first_layer", True),
            ("use_last_layernorm", True),
            ("use_mtp_layernorm", False),
        ):
            if nested.raw.get(key, needed) not in (needed, None):
                raise nested.error(key, f"must be {str(needed).lower()}")
        steps = nested.raw.get("parallel_draft_step")
        if steps not in (None, 0, 1):
            raise nested.error("parallel_draft_step", f"{steps!r}: parallel draft heads are not supported")
        others = ("causal", "use_swa", "attention_sink_bias", "attention_value_scale", "sample_from_anchor")
        for part, key in ((part, key) for part in (nested, self._top) for key in others if is_dflash):
            if part.raw.get(key) not in (None, False):
                raise part.error(key, "is not supported")
        self._check_verifier()

    def _num_layers(self) -> int:
        return self._layer.count("num_hidden_layers", default=1)

    def _mask_token(self, vocab: int) -> int:
        keys = ("mask_token_id", "pard_token", "ptd_token_id")
        key = next((key for key in keys if self._find(key) is not None), keys[0])
        value = self._find(key)
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < vocab:
            raise self._nested.error(key, f"{value!r}: must be the id of the masks' token, below {vocab}")
        return value

    def _check_verifier(self) -> None:
        """Check the target that a speculators file names."""
        found = self._top.raw.get("speculators_config")
        verifier = found.get("verifier") if isinstance(found, Mapping) else None
        name = verifier.get("name_or_path") if isinstance(verifier, Mapping) else None
        if isinstance(name, str):
            check_size(name, self._target, f"{self._top.where}: speculators_config: verifier")

    def _aux(self) -> tuple[tuple[int, ...], str]:
        target, nested = self._target, self._nested
        if self._kind == "dflash":
            return boundaries_of_dflash(self._top, nested, target.num_hidden_layers)
        if not self._switch("use_aux_hidden_state", default=True):
            return (), "no aux states: the target's final, normed state"
        ids = self._find(KEY)
        found = boundaries_of(nested, ids, target.num_hidden_layers, is_speculators=self._is_speculators)
        number = self._find("num_aux_hidden_states")
        if number is not None and number != len(found[0]):
            raise nested.error("num_aux_hidden_states", f"{number!r}, but there are {len(found[0])} states")
        return found

    def _target_hidden(self, hidden: int) -> int:
        key, wanted = "target_hidden_size", self._target.hidden_size
        if self._top.raw.get(key) is None:
            return self._same("hidden_size", hidden, wanted, self._layer)
        return self._same(key, self._top.count(key), wanted, self._top)

    def _kv_heads(self, heads: int) -> int:
        value = self._layer.count("num_key_value_heads", default=heads)
        if heads % value:
            raise self._layer.error("num_key_value_heads", f"must divide num_attention_heads {heads}")
        return value

    def _head_dim(self, hidden: int, heads: int) -> int:
        value = self._layer.count("head_dim", default=max(hidden // heads, 1))
        if value % 2:
            raise self._layer.error("head_dim", "must be even: rotary embedding rotates pairs")
        return value

    def _draft_vocab(self, vocab: int) -> int:
        value = self._top.count("draft_vocab_size", default=vocab)
        if value > vocab:
            raise self._top.error("draft_vocab_size", f"{value} is more than vocab_size {vocab}")
        return value

    def _same(self, key: str, value: int, wanted: int, fields: Fields) -> int:
        if value != wanted:
            raise fields.error(key, f"{value}, and the target's is {wanted}: a head of another model")
        return value

    def _find(self, key: str) -> Any:
        """Return the nested value, or else the top-level value."""
        value = self._nested.raw.get(key)
        return self._top.raw.get(key) if value is None else value

    def _switch(self, key: str, tensor: str | None = None, *, default: bool = False) -> bool:
        """Read a switch. ``tensor``: a tensor that exists if and only if the switch is on."""
        value = self._find(key)
        present = tensor is not None and self._names is not None and tensor in self._names
        if value is None:
            return default or present
        if not isinstance(value, bool):
            raise self._nested.error(key, "must be true or false")
        if present and not value:
            raise self._nested.error(key, f"is false, but the file has {tensor}")
        return value


def check_size(name: str, target: ModelConfig, where: str) -> None:
    """Raises ``ModelConfigError`` if ``name`` has the size of the other gpt-oss."""
    spelled = name.lower().replace("_", "-")
    layers = [count for size, count in _SIZES.items() if f"gpt-oss-{size}" in spelled]
    known = target.num_hidden_layers in _SIZES.values()
    if known and len(layers) == 1 and layers[0] != target.num_hidden_layers:
        size = next(size for size, count in _SIZES.items() if count == target.num_hidden_layers)
        problem = f"{name!r} is not for gpt-oss-{size}, the target"
        raise Fields({}, where).error("name", f"{problem}: a head of another model")


def read_rope(fields: Fields, theta: float = 10_000.0) -> RopeConfig | Llama3Rope:
    """Read the RoPE constants: plain, ``theta`` if the file has none, unless there are ``rope_parameters`` or
    ``rope_scaling`` of type llama3 or yarn."""
    key = "rope_parameters" if fields.raw.get("rope_parameters") is not None else "rope_scaling"
    rope = Fields({}, fields.where) if fields.raw.get(key) is None else fields.section(key)
    owner = rope if rope.raw.get("rope_theta") is not None else fields
    theta = owner.number("rope_theta", default=theta)
    if theta <= 1.0:
        raise owner.error("rope_theta", "must be more than 1")
    if any(part.raw.get("partial_rotary_factor") not in (None, 1, 1.0) for part in (fields, rope)):
        raise rope.error("partial_rotary_factor", "must be 1")
    kind = rope.raw.get("rope_type") or rope.raw.get("type")
    if kind in (None, "default"):
        return RopeConfig(theta=theta, factor=1.0)
    if kind == "llama3":
        return _llama3(rope, theta)
    if kind == "yarn":
        return _yarn(rope, fields, theta)
    raise rope.error("rope_type", f"{kind!r} is not one of default, llama3, yarn")


def _llama3(rope: Fields, theta: float) -> Llama3Rope:
    found = Llama3Rope(
        theta=theta,
        factor=rope.number("factor"),
        low_freq_factor=rope.number("low_freq_factor"),
        high_freq_factor=rope.number("high_freq_factor"),
        original_max_position=rope.count("original_max_position_embeddings"),
    )
    if found.high_freq_factor <= found.low_freq_factor:
        raise rope.error("high_freq_factor", "must be more than low_freq_factor")
    return found


def _yarn(rope: Fields, fields: Fields, theta: float) -> RopeConfig:
    name = "original_max_position_embeddings"
    original = rope.count(name) if name in rope.raw else fields.count("max_position_embeddings")
    found = read_yarn(rope, theta, original)
    if found.factor < 1.0:
        raise rope.error("factor", "must be 1 or more")
    if found.beta_fast <= found.beta_slow:
        raise rope.error("beta_fast", "must be more than beta_slow")
    return found
