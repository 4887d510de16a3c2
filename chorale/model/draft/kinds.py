"""Tells EAGLE3, P-EAGLE and DFlash heads apart, and refuses other drafters."""

from __future__ import annotations

import re
from collections.abc import Collection

from chorale.errors import ModelConfigError
from chorale.model.config_fields import Fields
from chorale.model.draft.config import Kind

# In names of drafters of other kinds, of which some have the name of a supported kind or its settings, too.
_OTHERS = ("dflash2", "domino", "dspark", "hydra", "medusa", "mlpspeculator", "mtp", "nextn", "redrafter")
_MASKS = ("ptd_token_id", "pard_token")
ONLY = "only EAGLE3, P-EAGLE and DFlash heads are supported"


def kind_of(fields: Fields, names: Collection[str]) -> Kind:
    """Return the kind. ``names``: its tensors' names. Raises ``ModelConfigError`` for other drafters."""
    raw = fields.raw
    names_itself = _names_of(fields)
    known = " ".join(names_itself)
    plain = [re.sub(r"[^a-z0-9]", "", name.lower()) for name in names_itself]
    if any(other in name for name in plain for other in _OTHERS):
        raise _error(fields, f"{known!r} is a drafter of another kind; {ONLY}")
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
