"""Short names of the models that Chorale serves, as other engines spell them."""

from __future__ import annotations

OWNER = "openai"
SIZES = ("20b", "120b")
NAMES = ("gpt-oss", "gpt-oss-safeguard")  # of equal architecture and sizes
# A colon is Ollama's spelling; its plain name is the smaller model.
SHORT = {f"{name}{mark}{size}": f"{OWNER}/{name}-{size}" for name in NAMES for size in SIZES for mark in "-:"}
SHORT |= {f"{name}{tag}": f"{OWNER}/{name}-20b" for name in NAMES for tag in ("", ":latest")}
SHORT["gpt-oss-puzzle-88b"] = "nvidia/gpt-oss-puzzle-88B"
SHORT |= {f"{prefix}{size}": f"{OWNER}/gpt-oss-{size}" for prefix in ("", "gptoss-") for size in SIZES}
PUBLISHED = tuple(dict.fromkeys(SHORT.values()))


def full_name(model: str) -> str:
    """Returns the hub id for a short name (in any case); returns other names unchanged."""
    return SHORT.get(model.lower(), model)
