"""read_speculative: from the operator's JSON to a SpeculativeConfig.

Names and defaults are those of vLLM's ``--speculative-config``. Drafts change the speed, never the
tokens, so a key that only concerns how vLLM computes drafts or accepts them is accepted without effect.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from itertools import pairwise
from typing import Any, cast

from chorale.config.speculative import METHODS, MOST_DRAFT_TOKENS, USUAL_NGRAM, Method, SpeculativeConfig
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
_NAMES = tuple(field.name for field in fields(SpeculativeConfig))
_KEYS = (*_NAMES, *IDLE, *REFUSED, "rejection_sample_method", *_SYNTHETIC[1:])


def read_speculative(given: Any, shown: str) -> tuple[SpeculativeConfig, tuple[str, ...]]:
    """Returns the config and a notice for each key without effect. ``shown``: the option's name in messages.

    Raises ``ConfigError`` for an unknown key, naming the nearest, for a value out of range and for a method
    that is not supported.
    """

    def fail(text: str) -> ConfigError:
        return ConfigError(f"{shown}: {text}")

    if not isinstance(given, Mapping):
        raise fail('must be a JSON object, such as {"method": "ngram", "num_speculative_tokens": 4}')
    values = {str(name): value for name, value in given.items() if value is not None}
    for name in values:
        if name not in _KEYS:
            near = difflib.get_close_matches(name, _KEYS, n=1)
            raise fail(f"unknown key {name!r}" + (f"; did you mean {near[0]}?" if near else ""))
        if name in REFUSED and values[name] is not False:
            raise fail(f"{name} is not supported: {REFUSED[name]}")
    try:
        method = _method(values)
        config = _build(method, values)
    except ValueError as error:
        raise fail(str(error)) from None
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
    near = difflib.get_close_matches(method, METHODS, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise ValueError(f"method {method!r} is not one of {', '.join(METHODS)}{hint}")


def _build(method: Method, values: Mapping[str, Any]) -> SpeculativeConfig:
    """Returns the config. Raises ``ValueError``."""
    acceptance = _acceptance(method, values)
    usual = len(acceptance) or _USUAL_TOKENS.get(method)
    count = values.get("num_speculative_tokens", usual)
    if count is None:
        raise ValueError(f"num_speculative_tokens is missing: 1 to {MOST_DRAFT_TOKENS}")
    most = _integer("num_speculative_tokens", count, 1, MOST_DRAFT_TOKENS)
    found = SpeculativeConfig(method=method, num_speculative_tokens=most)
    shortest, longest = _matches(values)
    for name, read in _READ.items():
        if name in values:
            found = replace(found, **{name: read(name, values[name])})
    schedule = values.get("num_speculative_tokens_per_batch_size")
    found = replace(
        found,
        prompt_lookup_min=shortest,
        prompt_lookup_max=longest,
        num_speculative_tokens_per_batch_size=() if schedule is None else _schedule(schedule, most),
        acceptance=acceptance if len(acceptance) < 1 else _profile(acceptance, most),
    )
    if method in ("ngram", "suffix") and found.model in (method, f"[{method}]"):
        return replace(found, model=None)  # vLLM's older form
    if method in ("eagle3", "dflash") and found.model is None and not acceptance:
        raise ValueError(f"method {method} needs model: a folder or hub id with the head")
    if found.parallel_drafting and method != "eagle3":
        if method != "dflash":
            raise ValueError(f"parallel_drafting needs a head (method eagle3), not method {method}")
        found = replace(found, parallel_drafting=None)  # DFlash always drafts in one pass
    if method in ("ngram", "suffix") and found.model is not None:
        raise ValueError(f"method {method} has no model; a head needs method eagle3")
    return found


def _matches(values: Mapping[str, Any]) -> tuple[int, int]:
    """Returns the lengths of the shortest and the longest match. If only one is given, both are equal."""
    given = [
        _integer(name, values[name], 1, 1024) if name in values else None
        for name in ("prompt_lookup_min", "prompt_lookup_max")
    ]
    shortest, longest = given
    shortest = shortest if shortest is not None else longest if longest is not None else USUAL_NGRAM
    longest = longest if longest is not None else shortest
    if shortest > longest:
        raise ValueError(f"prompt_lookup_min {shortest} is more than prompt_lookup_max {longest}")
    return shortest, longest


def _integer(name: str, value: Any, least: int, most: int) -> int:
    if isinstance(value, str) and value.strip().isdigit():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise ValueError(f"{name} {value!r}: must be an integer, {least} to {most}")
    return value


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise ValueError(f"{name} {value!r}: must be a number above 0")
    return float(value)


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError(f"{name} must be a string")
    return value


def _switch(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{name} {value!r}: must be true or false")
    return value


def _between(least: int, most: int) -> Callable[[str, Any], int]:
    return lambda name, value: _integer(name, value, least, most)


_READ: dict[str, Callable[[str, Any], Any]] = {
    "model": _text,
    "revision": _text,
    "parallel_drafting": _switch,
    "draft_tensor_parallel_size": _between(1, 1024),
    "suffix_decoding_max_tree_depth": _between(2, 1024),
    "suffix_decoding_max_cached_requests": _between(0, 2**31),
    "suffix_decoding_max_spec_factor": _number,
    "disable_by_batch_size": _between(1, 2**31),
}


def _schedule(given: Any, most: int) -> tuple[tuple[int, int, int], ...]:
    """Returns the ranges in order, as vLLM reads them. Raises ``ValueError`` for ranges that overlap."""
    name = "num_speculative_tokens_per_batch_size"
    if not isinstance(given, list | tuple) or not given:
        raise ValueError(f"{name} must be a list of [FROM, TO, TOKENS], such as [[1, 8, 3], [9, 64, 1]]")
    found: list[tuple[int, int, int]] = []
    for entry in given:
        if not isinstance(entry, list | tuple) or len(entry) != 3:
            hint = (
                "; ranges of contexts are not supported"
                if isinstance(entry, list) and len(entry) == 5
                else ""
            )
            raise ValueError(f"{name}: {entry!r} is not [FROM, TO, TOKENS]{hint}")
        low, high = (_integer(name, value, 1, 2**31) for value in entry[:2])
        if low > high:
            raise ValueError(f"{name}: {low} to {high} is not a range")
        found.append((low, high, min(most, _integer(name, entry[2], 0, 2**31))))
    found.sort()
    if found[0][0] != 1:
        raise ValueError(f"{name}: the first range must start at 1")
    for before, after in pairwise(found):
        if after[0] <= before[1]:
            raise ValueError(f"{name}: {before[0]} to {before[1]} and {after[0]} to {after[1]} overlap")
    return tuple(found)


def _acceptance(method: Method, values: Mapping[str, Any]) -> tuple[float, ...]:
    """Returns the synthetic profile, () for real drafts. A single rate applies to each token whose
    predecessors are accepted."""
    how = values.get("rejection_sample_method", "standard")
    if how not in ("standard", "block", "synthetic"):
        raise ValueError(f"rejection_sample_method {how!r} is not one of standard, block, synthetic")
    given = [name for name in _SYNTHETIC if name in values]
    if method != "synthetic" and how != "synthetic":
        if given:
            raise ValueError(f"{given[0]} needs method synthetic (or rejection_sample_method synthetic)")
        return ()
    if len(given) != 1:
        raise ValueError(f"synthetic acceptance needs exactly one of {', '.join(_SYNTHETIC)}")
    name, value = given[0], values[given[0]]
    if isinstance(value, list | tuple):
        return tuple(_rate(name, rate) for rate in value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(
            f"{name} {value!r}: must be a number" + (" or a list" if name == "acceptance" else "")
        )
    count = _integer("num_speculative_tokens", values.get("num_speculative_tokens"), 1, MOST_DRAFT_TOKENS)
    if name == "acceptance":
        return tuple(_rate(name, value) ** position for position in range(1, count + 1))
    if name == "synthetic_acceptance_rates":
        raise ValueError(f"{name} must be a list with one rate per draft token")
    if not 1 <= value <= count + 1:
        raise ValueError(f"{name} {value!r}: must be 1 to {count + 1} (num_speculative_tokens + 1)")
    return tuple(min(1.0, max(0.0, value - position)) for position in range(1, count + 1))


def _rate(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise ValueError(f"{name}: {value!r} is not a rate, 0 to 1")
    return float(value)


def _profile(rates: tuple[float, ...], most: int) -> tuple[float, ...]:
    if len(rates) != most:
        raise ValueError(f"acceptance has {len(rates)} rates for num_speculative_tokens {most}")
    if any(after > before for before, after in pairwise(rates)):
        raise ValueError("acceptance must not rise: a draft token is accepted only after all those before it")
    return rates


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
