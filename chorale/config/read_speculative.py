"""read_speculative: from the operator's JSON to a SpeculativeConfig.

Names and defaults are those of vLLM's ``--speculative-config``. Drafts change the speed, never the
tokens, so a key that only concerns how vLLM computes drafts or accepts them is accepted without effect.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from itertools import pairwise
from typing import Any, cast

from chorale.config.read_objects import convert, known_keys
from chorale.config.speculative import METHODS, MOST_DRAFT_TOKENS, Method, SpeculativeConfig
from chorale.config.suggestions import nearest
from chorale.errors import ConfigError

_SYNONYMS = {"eagle": "eagle3", "[ngram]": "ngram", "ngram_gpu": "ngram"}
# Default number of draft tokens per step. A suffix draft is never longer than its match.
_USUAL_TOKENS: dict[str, int] = {"ngram": 4, "suffix": MOST_DRAFT_TOKENS, "eagle3": 3, "dflash": 7}
# vLLM's methods and keys that are refused or have no effect here, each with the reason.
HEADS = "use an EAGLE3 or DFlash head (method eagle3 or dflash), or ngram or suffix, which need no weights"
REFUSED_METHODS = {
    "medusa": HEADS,
    "mlp_speculator": HEADS,
    "draft_model": f"a second model as drafter is not supported; {HEADS}",
    "mtp": f"gpt-oss has no multi-token prediction layers; {HEADS}",
    "dspark": f"block diffusion drafters other than DFlash are not supported; {HEADS}",
    "extract_hidden_states": "it writes hidden states for training and drafts nothing",
    "custom_class": f"external code is not loaded into the engine; {HEADS}",
}
# Parts of a model's name that reveal its method, more specific ones first.
NAMED = (("dflash", "dflash"), ("dspark", "dspark"), ("medusa", "medusa"), ("-mtp", "mtp"))

OWN_FILES = "the head's files determine it"
KERNELS = "Chorale picks its own kernels"
EXACT = "a draft token is accepted if it equals the sampled token; answers are those without speculation"
# vLLM's keys without effect, each with the reason.
IDLE = {
    "quantization": OWN_FILES,
    "max_model_len": OWN_FILES,
    "index_share_for_mtp_iteration": OWN_FILES,
    "code_revision": "no remote code is ever run",
    "moe_backend": KERNELS,
    "attention_backend": KERNELS,
    "kv_cache_dtype": KERNELS,
    "enforce_eager": "--enforce-eager applies to drafts, too",
    "draft_load_config": "weights are read from safetensors",
    "disable_padded_drafter_batch": KERNELS,
    "disable_eagle_block_drop": "no block of a prefix is dropped",
    "use_local_argmax_reduction": "the head is replicated on each rank",
    "draft_sample_method": "drafts are sampled with the noise of the tokens that they guess",
    "acceptance_method": EXACT,
    "posterior_threshold": EXACT,
    "posterior_alpha": EXACT,
    "disable_logprobs": "log-probabilities equal those without speculation",
    "disable_log_stats": "--disable-log-stats applies to drafts, too",
    "suffix_decoding_min_token_prob": "a suffix is followed where it occurred last, not by frequency",
    "dspark_draft_topk": "it belongs to another method",
}
# Keys that are refused unless their value requests nothing.
REFUSED = {
    "use_heterogeneous_vocab": "a head drafts tokens of gpt-oss's vocabulary",
    "enable_adaptive_verification": "num_speculative_tokens_per_batch_size sets the number of draft tokens",
    "tensor_parallel_size": "the key is named draft_tensor_parallel_size",
    "target_model_config": "it is not an option",
    "target_parallel_config": "it is not an option",
    "draft_model_config": "it is not an option",
    "draft_parallel_config": "it is not an option",
}

_SYNTHETIC = ("acceptance", "synthetic_acceptance_rates", "synthetic_acceptance_length")
_NAMES = tuple(field.name for field in fields(SpeculativeConfig) if field.name != "shown")
_KEYS = (*_NAMES, *IDLE, *REFUSED, "rejection_sample_method", *_SYNTHETIC[1:])


def read_speculative(given: Any, shown: str) -> tuple[SpeculativeConfig, tuple[str, ...]]:
    """Returns the config and a notice for each key without effect. ``shown``: the option's name in messages.

    Raises ``ConfigError`` for an unknown key, naming the nearest, for a value out of range and for a method
    that is not supported.
    """
    values = known_keys(given, _KEYS, shown, '{"method": "ngram", "num_speculative_tokens": 4}')
    for name in values:
        if name in REFUSED and values[name] is not False:
            raise ConfigError(f"{shown}: {name} is not supported: {REFUSED[name]}")
    try:
        method = _method(values)
        config = _build(method, values, shown)
    except ValueError as error:
        raise ConfigError(f"{shown}: {error}") from None
    idle = [name for name in values if name in IDLE]
    notices = [f"{name} in {shown} is accepted and has no effect: {IDLE[name]}" for name in idle]
    notices += _partial(method, values, shown)
    return config, tuple(notices)


def _method(values: Mapping[str, Any]) -> Method:
    """Returns the method, derived from the model's name if not given. Raises ``ValueError``."""
    method, model = values.get("method"), values.get("model")
    for name, value in (("method", method), ("model", model)):
        if value is not None and (not isinstance(value, str) or not value):
            raise ValueError(f"{name} must be a string")
    if method is None:
        if model is None:
            raise ValueError(f"method is missing: one of {', '.join(METHODS[:4])}")
        named = str(model).lower()
        found = next((kind for part, kind in NAMED if part in named), None)
        plain = named if named in METHODS or named in _SYNONYMS else "eagle3"
        method = found or plain
    method = _SYNONYMS.get(method, method)
    if method in METHODS:
        return cast(Method, method)
    key = "mtp" if method.endswith("_mtp") else method
    if key in REFUSED_METHODS:
        raise ValueError(f"method {method} is not supported: {REFUSED_METHODS[key]}")
    raise ValueError(f"method {method!r} is not one of {', '.join(METHODS)}{nearest(method, METHODS)}")


def _build(method: Method, values: Mapping[str, Any], shown: str) -> SpeculativeConfig:
    """Returns the config. Raises ``ValueError``, or ``ConfigError`` for a value that its field refuses."""
    profile = _profile(method, values)
    own = {name: values[name] for name in _NAMES if name in values} | {"method": method, "acceptance": ()}
    usual = len(profile) if isinstance(profile, list | tuple) else _USUAL_TOKENS.get(method)
    if own.setdefault("num_speculative_tokens", usual) is None:
        raise ValueError(f"num_speculative_tokens is missing: 1 to {MOST_DRAFT_TOKENS}")
    for one, other in pairwise(("prompt_lookup_min", "prompt_lookup_max", "prompt_lookup_min")):
        if one in own:  # if only one is given, both are equal
            own.setdefault(other, own[one])
    found = convert(own, SpeculativeConfig, shown)
    shortest, longest, most = found.prompt_lookup_min, found.prompt_lookup_max, found.num_speculative_tokens
    if shortest > longest:
        raise ValueError(f"prompt_lookup_min {shortest} is more than prompt_lookup_max {longest}")
    if profile is not None:
        found = convert(own | {"acceptance": _rates(profile, values, most)}, SpeculativeConfig, shown)
        if any(after > before for before, after in pairwise(found.acceptance)):
            raise ValueError(
                "acceptance must not rise: a draft token is accepted only after all those before it"
            )
    return _with_model(replace(found, num_speculative_tokens_per_batch_size=_schedule(found)))


def _with_model(found: SpeculativeConfig) -> SpeculativeConfig:
    """Checks that the method fits the model. Raises ``ValueError``."""
    method = found.method
    if method in ("ngram", "suffix") and found.model in (method, f"[{method}]"):
        return replace(found, model=None)  # vLLM's older form
    if method in ("eagle3", "dflash") and found.model is None and not found.acceptance:
        raise ValueError(f"method {method} needs model: a folder or hub id with the head")
    if found.parallel_drafting and method != "eagle3":
        if method != "dflash":
            raise ValueError(f"parallel_drafting needs a head (method eagle3), not method {method}")
        found = replace(found, parallel_drafting=None)  # DFlash always drafts in one pass
    if method in ("ngram", "suffix") and found.model is not None:
        raise ValueError(f"method {method} has no model; a head needs method eagle3")
    return found


def _schedule(config: SpeculativeConfig) -> tuple[tuple[int, int, int], ...]:
    """Returns the ranges in order, as vLLM reads them. Raises ``ValueError`` for ranges that overlap."""
    name, most = "num_speculative_tokens_per_batch_size", config.num_speculative_tokens
    found = sorted((low, high, min(most, count)) for low, high, count in getattr(config, name))
    for low, high, _ in found:
        if low > high:
            raise ValueError(f"{name}: {low} to {high} is not a range")
    if found and found[0][0] != 1:
        raise ValueError(f"{name}: the first range must start at 1")
    for before, after in pairwise(found):
        if after[0] <= before[1]:
            raise ValueError(f"{name}: {before[0]} to {before[1]} and {after[0]} to {after[1]} overlap")
    return tuple(found)


def _profile(method: Method, values: Mapping[str, Any]) -> Any:
    """Returns the value of the key for synthetic acceptance, None for real drafts. Raises ``ValueError``."""
    how = values.get("rejection_sample_method", "standard")
    if how not in ("standard", "block", "synthetic"):
        raise ValueError(f"rejection_sample_method {how!r} is not one of standard, block, synthetic")
    given = [name for name in _SYNTHETIC if name in values]
    if method != "synthetic" and how != "synthetic":
        if given:
            raise ValueError(f"{given[0]} needs method synthetic (or rejection_sample_method synthetic)")
        return None
    if len(given) != 1:
        raise ValueError(f"synthetic acceptance needs exactly one of {', '.join(_SYNTHETIC)}")
    return values[given[0]]


def _rates(profile: Any, values: Mapping[str, Any], count: int) -> list[Any]:
    """Returns the acceptance of each token. A single rate applies to each token whose predecessors are
    accepted."""
    if isinstance(profile, list | tuple):
        if len(profile) != count:
            raise ValueError(f"acceptance has {len(profile)} rates for num_speculative_tokens {count}")
        return list(profile)
    name = next(each for each in _SYNTHETIC if each in values)
    if isinstance(profile, bool) or not isinstance(profile, int | float):
        raise ValueError(f"{name} {profile!r}: must be a number or a list")
    if name == "acceptance":
        return [profile**position for position in range(1, count + 1)]
    if name == "synthetic_acceptance_rates":
        raise ValueError(f"{name} must be a list with one rate per draft token")
    if not 1 <= profile <= count + 1:
        raise ValueError(f"{name} {profile!r}: must be 1 to {count + 1} (num_speculative_tokens + 1)")
    return [min(1.0, max(0.0, profile - position)) for position in range(1, count + 1)]


def _partial(method: Method, values: Mapping[str, Any], shown: str) -> list[str]:
    """Returns notices about values that act differently than in vLLM."""
    found = []
    if values.get("suffix_decoding_max_cached_requests", 0) and method == "suffix":
        found.append(
            f"suffix_decoding_max_cached_requests in {shown} acts differently: the newest 65,536 tokens of "
            "answers are kept for each cache_salt, regardless of the number of requests; 0 keeps none"
        )
    if values.get("rejection_sample_method") == "block":
        found.append(f"rejection_sample_method in {shown} is accepted and has no effect: {EXACT}")
    return found
