"""Memory for drafts: the head's weights, keys and values, and activations. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from chorale.config.speculative import SpeculativeConfig
from chorale.errors import ConfigError
from chorale.model.config import ModelConfig
from chorale.model.config_fields import read_json_object
from chorale.model.draft.config import HeadConfig, Kind, published_head
from chorale.model.draft.parse import read_head_config
from chorale.model.hub import find_folder
from chorale.runtime.sizing.graph_sizes import MOST_DRAFTING_ROWS
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
        return published_head(model, assumed_kind(config))
    path = Path(folder) / "config.json"
    head = read_head_config(read_json_object(path), str(path), model)
    check_head(config, head, str(path))
    return head


def assumed_kind(config: SpeculativeConfig) -> Kind:
    """Returns the kind of a random head, or of one whose files are not there yet."""
    if config.method == "dflash":
        return "dflash"
    return "peagle" if config.parallel_drafting else "eagle3"


def check_head(config: SpeculativeConfig, head: HeadConfig, where: str) -> None:
    """Raises ``ConfigError`` if the head is not of the configured kind, or its blocks are too short."""
    if config.method != "synthetic" and (config.method == "dflash") != (head.kind == "dflash"):
        wanted = "dflash" if head.kind == "dflash" else "eagle3"
        raise ConfigError(f"{where}: the head needs method {wanted}, not {config.method}")
    is_peagle = head.kind == "peagle"
    if config.parallel_drafting not in (None, is_peagle):
        raise ConfigError(f"{where}: parallel_drafting must be {str(is_peagle).lower()} for this head")
    if head.most_drafts is not None and config.num_speculative_tokens > head.most_drafts:
        problem = f"num_speculative_tokens {config.num_speculative_tokens} is more than its block_size"
        raise ConfigError(f"{where}: {problem} {head.most_drafts}")


def draft_memory(
    config: SpeculativeConfig | None,
    model: ModelConfig,
    dtype: str,
    kv_dtype: str,
    block_size: int,
    tokens: int,
) -> DraftMemory:
    """Compute the sizes. ``tokens``: number of tokens in the largest step."""
    head = head_config(config, model)
    if head is None or config is None:
        return NO_DRAFT_MEMORY
    note = ""
    if config.model is not None and find_folder(config.model) is None:
        note = f"draft head {config.model}: not on this machine; sizes are those of published heads"
    return DraftMemory(
        head_bytes(head, dtype),
        head_kv_bytes(head, block_size, kv_dtype),
        head_activation_bytes(head, tokens, MOST_DRAFTING_ROWS),
        note,
    )
