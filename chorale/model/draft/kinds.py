"""Tells EAGLE3, P-EAGLE and DFlash heads apart, and refuses other drafters with their name and the reason."""

from __future__ import annotations

import re
from collections.abc import Collection

from chorale.errors import ModelConfigError
from chorale.model.config_fields import Fields
from chorale.model.draft.config import Kind

# (word in the configuration's names, kind of drafter, reason for the refusal)
_OTHERS = (
    ("dflash2", "a DFlash2 drafter", "its convolution and selector are not supported"),
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
    "medusa_num_heads": "medusa",
    "num_nextn_predict_layers": "mtp",
}
_MASKS = ("ptd_token_id", "pard_token")
ONLY = "only EAGLE3, P-EAGLE and DFlash heads are supported"


def kind_of(fields: Fields, names: Collection[str]) -> Kind:
    """Return the kind. ``names``: its tensors' names. Raises ``ModelConfigError`` for other drafters."""
    raw = fields.raw
    names_itself = _names_of(fields)
    known = " ".join(names_itself)
    plain = [re.sub(r"[^a-z0-9]", "", name.lower()) for name in names_itself]
    kinds = [kind for kind, *_ in _OTHERS if any(kind in name for name in plain)]
    kinds += [kind for key, kind in _KEYS.items() if raw.get(key)]
    kinds += ["medusa"] if any("medusa" in name for name in names) else []
    for kind, what, why in _OTHERS:
        if kind in kinds:
            raise _error(fields, f"this is {what}: {why}; {ONLY}")
    if "dflash_config" in raw or any("dflash" in name for name in plain):
        return "dflash"
    has_mask = "mask_hidden" in names or any(raw.get(key) is not None for key in _MASKS)
    if has_mask or any("peagle" in name for name in plain):
        return "peagle"
    if any("eagle3" in name for name in plain):
        return "eagle3"
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
