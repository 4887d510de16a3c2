"""Refuses drafters that are not EAGLE3 heads, with their name and the reason."""

from __future__ import annotations

import re
from collections.abc import Collection

from chorale.errors import ModelConfigError
from chorale.model.config_fields import Fields

# (word in the configuration's names, kind of drafter, reason for the refusal)
_OTHERS = (
    ("peagle", "a P-EAGLE head", "its layers draft all tokens in one pass with masked inputs"),
    ("dflash", "a DFlash drafter", "it drafts a block of tokens by diffusion"),
    ("dspark", "a DSpark drafter", "it drafts a block of tokens by diffusion"),
    ("domino", "a Domino drafter", "it drafts a block of tokens at once"),
    ("medusa", "a Medusa head", "its heads draft several tokens independently"),
    ("hydra", "a Hydra head", "its heads draft several tokens in one pass"),
    ("mlpspeculator", "an MLP speculator", "it has no attention over the target's states"),
    ("redrafter", "a ReDrafter head", "it is a recurrent network"),
    ("nextn", "an MTP layer", "it is a layer of the model that it was trained with, and gpt-oss has none"),
    ("mtp", "an MTP layer", "it is a layer of the model that it was trained with, and gpt-oss has none"),
)
_KEYS = {
    "dflash_config": "dflash",
    "medusa_num_heads": "medusa",
    "num_nextn_predict_layers": "mtp",
    "ptd_token_id": "peagle",
    "parallel_drafting": "peagle",
}
ONLY = "only EAGLE3 heads of one layer are supported"


def refuse_other_kinds(fields: Fields, names: Collection[str]) -> None:
    """Raises ``ModelConfigError`` unless the configuration is an EAGLE3 head's. ``names``: its tensors'
    names."""
    raw = fields.raw
    names_itself = _names_of(fields)
    known = " ".join(names_itself)
    plain = [re.sub(r"[^a-z0-9]", "", name.lower()) for name in names_itself]
    kinds = [kind for kind, *_ in _OTHERS if any(kind in name for name in plain)]
    kinds += [kind for key, kind in _KEYS.items() if raw.get(key)]
    kinds += ["peagle"] if any(name.endswith("mask_hidden") for name in names) else []
    kinds += ["medusa"] if any("medusa" in name for name in names) else []
    for kind, what, why in _OTHERS:
        if kind in kinds:
            raise _error(fields, f"this is {what}: {why}; {ONLY}")
    if any("eagle3" in name for name in plain):
        return
    if any("eagle" in name for name in plain):
        raise _error(fields, f"{known!r} is an EAGLE (1 or 2) head, which reads other states; {ONLY}")
    if not names_itself:
        raise _error(fields, f"names no architecture; {ONLY}")
    raise _error(fields, f"{known!r} is not a draft head; {ONLY}")


def _names_of(fields: Fields) -> list[str]:
    """Return the names of architecture and type in the configuration."""
    algorithm = fields.raw.get("speculators_config")
    found = fields.raw.get("architectures") or []
    found = list(found) if isinstance(found, list | tuple) else [found]
    found.append(fields.raw.get("speculators_model_type"))
    if isinstance(algorithm, dict):
        found.append(algorithm.get("algorithm"))
    if not any(found):
        found.append(fields.raw.get("model_type"))
    return [str(name)[:80] for name in found if name]


def _error(fields: Fields, problem: str) -> ModelConfigError:
    return ModelConfigError(f"{fields.where}: {problem}")
