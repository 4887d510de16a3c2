"""Loads a ``DraftHead`` from a folder."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from chorale.errors import CheckpointError
from chorale.kernels.ops import Ops
from chorale.model.checkpoint import Checkpoint
from chorale.model.config import ModelConfig
from chorale.model.draft.files import HeadFiles
from chorale.model.draft.head import DraftHead
from chorale.model.draft.pack import pack_weights
from chorale.model.draft.parse import check_size

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Target:
    """The model that a head drafts for, with the tensors that a head may share.

    ``embedding``: its embedding on the device, or a rank's part of it, with ``embed`` ([T] ids -> [T, H]) to
    look up ids in all parts. ``folder``: its checkpoint, from which a head without an output matrix takes its
    tokens' rows.
    """

    config: ModelConfig
    folder: Path | None = None
    embedding: torch.Tensor | None = None
    embed: Callable[[torch.Tensor], torch.Tensor] | None = None


def load_head(
    folder: str | Path,
    target: Target,
    ops: Ops,
    *,
    device: str | torch.device,
    dtype: torch.dtype,
    max_len: int | None = None,
) -> DraftHead:
    """Map, check and pack a head in either style.

    ``ops``: any rank's, because each has the whole head. ``dtype``: type of products. Raises ``ConfigError``.
    """
    folder = Path(folder)
    check_size(_name_of(folder), target.config, str(folder))
    files = HeadFiles(folder, target.config)
    token_ids = files.token_ids()
    source = _Source(files, target, token_ids, torch.device(device), dtype)
    shares = source.shares_embedding
    weights = pack_weights(files.config, source.read, token_ids.to(device), ops, dtype)
    logger.info("draft head %s: %s", folder, files.config.aux_source)
    return DraftHead(files.config, weights, ops, max_len, target.embed if shares else None)


def _name_of(folder: Path) -> str:
    """Return the folder's name; in the hub's cache, the repository's name."""
    return folder.parent.parent.name if folder.parent.name == "snapshots" else folder.name


class _Source:
    """Reads the head's tensors to the device, or the target's where the head has none."""

    def __init__(
        self,
        files: HeadFiles,
        target: Target,
        token_ids: torch.Tensor,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self._files, self._target, self._token_ids = files, target, token_ids
        self._device, self._dtype = device, dtype
        self._own_embedding = self._find_embedding()

    @property
    def shares_embedding(self) -> bool:
        return self._own_embedding is None and self._target.embedding is not None

    def read(self, name: str) -> torch.Tensor | None:
        if name == "embed_tokens.weight":
            return self._target.embedding if self._own_embedding is None else self._own_embedding
        tensor = self._files.read(name)
        if tensor is None and name == "lm_head.weight":
            tensor = self._of_target("head", name)[self._token_ids]
        if tensor is None and name == self._files.config.state_norm:  # the default of engines is ones
            tensor = torch.ones(self._files.config.hidden_size)
        return None if tensor is None else tensor.to(self._device)

    def _find_embedding(self) -> torch.Tensor | None:
        """Return the head's embedding, or None if it equals the target's, which is then shared."""
        own, shared = self._files.read("embed_tokens.weight"), self._target.embedding
        if own is None and shared is not None:
            self._check_width("embed_tokens.weight")
            return None
        if own is None:
            own = self._of_target("embedding", "embed_tokens.weight")
        own = own.to(self._device)
        if shared is not None and shared.shape == own.shape and torch.equal(own.to(shared.dtype), shared):
            return None
        return own if own.dtype in (self._dtype, torch.bfloat16) else own.to(self._dtype)

    def _of_target(self, role: str, name: str) -> torch.Tensor:
        """Read a tensor that the head shares with the target from the target's files."""
        self._check_width(name)
        if self._target.folder is None:
            raise CheckpointError(f"{self._files.folder}: {name}: missing, and the target's is not available")
        return Checkpoint(self._target.folder, self._target.config).read(None, role)

    def _check_width(self, name: str) -> None:
        own, theirs = self._files.config.hidden_size, self._target.config.hidden_size
        if own != theirs:
            problem = f"missing, and the target's is {theirs} wide, not {own}"
            raise CheckpointError(f"{self._files.folder}: {name}: {problem}")
