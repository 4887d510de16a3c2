"""Finds which of the target's states a head reads.

``eagle_aux_hidden_state_layer_ids`` has two interpretations, which differ by one block. A *boundary* b is the
residual stream after b blocks (0: the embedding; all blocks: before the final norm). A *layer* l, counted
from 0, is the output of block l, which is boundary l + 1. Files do not tell which is meant, so:

* in the speculators format, which is made for vLLM, ids are boundaries as in vLLM;
* elsewhere they are boundaries if one of them cannot be a layer (36 of 36 blocks, as in NVIDIA's v3);
* elsewhere they are layers if the first is 1, as SpecForge and ModelOpt write it (1, 17, 32 are the
  boundaries 2, 18, 33 of EAGLE3's code, which TensorRT-LLM captures by default), else boundaries.

The last rule is SGLang's for most models; for gpt-oss, SGLang and vLLM read every list as boundaries. With
states that are off by one block a head still works, but its drafts are worse. The interpretation is therefore
logged and can be overridden.
"""

from __future__ import annotations

from chorale.model.config_fields import Fields
from chorale.model.draft.config import default_boundaries

KEY = "eagle_aux_hidden_state_layer_ids"
_MOST_STATES = 16  # published heads have three


def boundaries_of(
    fields: Fields, ids: object, num_layers: int, *, is_speculators: bool
) -> tuple[tuple[int, ...], str]:
    """Returns (boundaries, how they were found, for a log line). ``ids`` is the value of ``KEY``."""
    if ids is None or ids == []:
        found = default_boundaries(num_layers)
        return found, f"no {KEY}: the usual boundaries {_shown(found)}"
    read = _checked(fields, ids)
    if is_speculators:
        found, why = read, "boundaries: the format is speculators'"
    elif num_layers in read:
        found, why = read, f"boundaries: {num_layers} is the end of the target"
    elif read[0] == 1:
        found, why = tuple(i + 1 for i in read), "layers: assumed, because the first is 1"
    else:
        found, why = read, "boundaries: assumed, because the first is not 1"
    if max(found) > num_layers:
        raise fields.error(
            KEY, f"{list(read)}: the target has {num_layers} layers; this head was made for another model"
        )
    return found, f"{KEY} {_shown(read)} read as {why}; states after {_shown(found)} blocks"


def boundaries_of_dflash(top: Fields, section: Fields, num_layers: int) -> tuple[tuple[int, ...], str]:
    """Like ``boundaries_of``, for DFlash, which says what its ids are: boundaries in the format of
    speculators, and layers in ``target_layer_ids``."""
    theirs = top.raw.get("num_target_layers")
    if theirs not in (None, num_layers):
        raise top.error("num_target_layers", f"{theirs!r}, and the target has {num_layers}: another model's")
    for key in (KEY, "aux_hidden_state_layer_ids"):
        if top.raw.get(key):
            return boundaries_of(top, top.raw[key], num_layers, is_speculators=True)
    key = "target_layer_ids"
    read = _checked(section, section.raw.get(key), key)
    if not read or max(read) >= num_layers:
        raise section.error(key, f"{list(read)}: must be layers of the target, from 0 to {num_layers - 1}")
    return tuple(i + 1 for i in read), f"{key} {_shown(read)}: states after these layers"


def _checked(fields: Fields, ids: object, key: str = KEY) -> tuple[int, ...]:
    if not isinstance(ids, list | tuple) or len(ids) > _MOST_STATES:
        raise fields.error(key, f"must be a list of at most {_MOST_STATES} numbers")
    if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
        raise fields.error(key, "must be a list of numbers from 0 up")
    if len(set(ids)) != len(ids):
        raise fields.error(key, f"{list(ids)}: a number appears twice")
    return tuple(ids)


def _shown(numbers: tuple[int, ...]) -> str:
    return ", ".join(map(str, numbers))
