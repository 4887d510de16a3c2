"""Short names of the two models that Chorale serves, as other engines spell them."""

from __future__ import annotations

OWNER = "openai"
SIZES = ("20b", "120b")
# gpt-oss:20b and gpt-oss are Ollama's spellings; its plain name is the smaller one.
SHORT = {
    spelling: f"{OWNER}/gpt-oss-{size}"
    for size in SIZES
    for spelling in (size, f"gpt-oss-{size}", f"gpt-oss:{size}", f"gptoss-{size}")
} | {"gpt-oss": f"{OWNER}/gpt-oss-20b", "gpt-oss:latest": f"{OWNER}/gpt-oss-20b"}
PUBLISHED = tuple(dict.fromkeys(SHORT.values()))


def full_name(model: str) -> str:
    """Returns the hub id for a short name (in any case); returns other names unchanged."""
    return SHORT.get(model.lower(), model)
