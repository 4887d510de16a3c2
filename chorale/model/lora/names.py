"""Names of tensors in an adapter: PEFT's, Unsloth's and Tinker's, as places in the model.

Adapters of experts exist as one 3-D tensor pair for each layer (PEFT's ``target_parameters``, whose wrappers
are nested: ``experts.base_layer`` is one of gate_up and down, ``experts`` the other), as a pair for each
expert (Unsloth: ``gate_up_projs.N``), and as separate pairs for gate and up (Tinker: ``N.gate_proj``).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

Role = Literal["q", "k", "v", "o", "router", "stacked", "gate_up", "gate", "up", "down", "head"]
Half = Literal["A", "B", "bias", "full", "base"]

_PREFIX = r"(?:base_model\.model\.)?"
_LAYER = re.compile(
    _PREFIX + r"(?P<module>model\.layers\.(?P<layer>\d{1,4})\.(?P<rest>[\w.]{1,80}?))"
    r"\.lora_(?P<half>[AB])(?:\.default)?\.(?P<kind>weight|bias)"
)
_HEAD = re.compile(
    _PREFIX + r"lm_head\.(?:lora_(?P<half>[AB])(?:\.default)?\.(?P<kind>weight|bias)"
    r"|(?P<full>weight|modules_to_save(?:\.default)?\.weight)|(?P<base>base_layer\.weight))"
)
_EXPERT = re.compile(
    r"mlp\.experts\.(?:(gate_up|down)_projs\.(\d{1,4})|(\d{1,4})\.(gate_up|gate|up|down)_proj)"
)
_MODULES: dict[str, Role] = {
    "self_attn.q_proj": "q",
    "self_attn.k_proj": "k",
    "self_attn.v_proj": "v",
    "self_attn.o_proj": "o",
    "mlp.router": "router",
    "mlp.router.linear": "router",  # Unsloth's router
    "mlp.experts": "stacked",
    "mlp.experts.base_layer": "stacked",
}


@dataclass(frozen=True, slots=True)
class Place:
    """What a tensor belongs to. ``module``: its name in PEFT, for rank and alpha patterns."""

    module: str
    role: Role
    half: Half
    layer: int | None = None  # None: the head
    expert: int | None = None  # None: all experts, or not an expert


def place_of(name: str) -> Place | None:
    """Return the place of a tensor, or None if the name is unknown."""
    found = _HEAD.fullmatch(name)
    if found is not None:
        whole: Half = "full" if found["full"] else "base"
        half = _half(found) if found["half"] else whole
        return None if half is None else Place("lm_head", "head", half)
    found = _LAYER.fullmatch(name)
    half = None if found is None else _half(found)
    if found is None or half is None:
        return None
    layer, rest = int(found["layer"]), found["rest"]
    if rest in _MODULES:
        return Place(found["module"], _MODULES[rest], half, layer)
    expert = _EXPERT.fullmatch(rest)
    if expert is None:
        return None
    role: Role = expert[1] or expert[4]  # type: ignore[assignment]
    return Place(found["module"], role, half, layer, int(expert[2] or expert[3]))


def _half(found: re.Match[str]) -> Half | None:
    if found["kind"] == "bias":
        return "bias" if found["half"] == "B" else None
    return "A" if found["half"] == "A" else "B"
