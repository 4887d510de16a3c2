"""Memory for drafts: the head's weights, keys and values, and activations. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from chorale.config.speculative import SpeculativeConfig
from chorale.model.config import ModelConfig
from chorale.model.config_fields import read_json_object
from chorale.model.draft.config import HeadConfig, published_head
from chorale.model.draft.parse import read_head_config
from chorale.model.hub import find_folder
from chorale.runtime.sizing.memory import gib, head_activation_bytes, head_bytes, head_kv_bytes


@dataclass(frozen=True, slots=True)
class DraftMemory:
    """Bytes on each GPU."""

    weights: int = 0
    per_block: int = 0  # bytes of keys and values in one block of the pool
    activations: int = 0
    note: str = ""

    def __str__(self) -> str:
        return f"{gib(self.weights)} for the draft head, {gib(self.activations)} for its work"


NO_DRAFT_MEMORY = DraftMemory()


def head_config(config: SpeculativeConfig | None, model: ModelConfig) -> HeadConfig | None:
    """Returns the configuration of the head, or that of published heads if it is random or not on this
    machine yet. Raises ``ConfigError``."""
    if config is None or not config.has_head:
        return None
    folder = None if config.model is None else find_folder(config.model)
    if folder is None:
        return published_head(model)
    path = Path(folder) / "config.json"
    return read_head_config(read_json_object(path), str(path), model)


def draft_memory(
    config: SpeculativeConfig | None,
    model: ModelConfig,
    *,
    dtype: str,
    kv_dtype: str,
    block_size: int,
    num_tokens: int,
    num_rows: int,
) -> DraftMemory:
    """Compute the sizes. ``num_tokens``: tokens of the largest step; ``num_rows``: rows of the largest
    drafting step."""
    head = head_config(config, model)
    if head is None or config is None:
        return NO_DRAFT_MEMORY
    is_assumed = config.model is not None and find_folder(config.model) is None
    return DraftMemory(
        head_bytes(head, dtype),
        head_kv_bytes(head, block_size, kv_dtype),
        head_activation_bytes(head, num_tokens, num_rows),
        f"draft head {config.model}: not on this machine; sizes are those of published heads"
        if is_assumed
        else "",
    )
