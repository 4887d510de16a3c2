"""Encodes batches of KV events as msgpack, with events as maps (vLLM 0.26) or arrays (earlier versions).

Structs list their fields in the order of the array form. docs/reference/kv-events.md describes both forms.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from chorale.config.kv_events import Encoding
from chorale.engine.kv_cache.index_log import BlocksRemoved, BlocksStored, IndexEvent, event_hash
from chorale.engine.types import CacheGroup

_KINDS = {CacheGroup.FULL: "full_attention", CacheGroup.WINDOW: "sliding_window"}


class _Stored(msgspec.Struct, tag="BlockStored", omit_defaults=True, gc=False):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str
    lora_name: str | None
    extra_keys: list[list[str] | None] | None = (
        None  # per block; only the first block of a salted chain has one
    )
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class _Removed(msgspec.Struct, tag="BlockRemoved", omit_defaults=True, gc=False):
    block_hashes: list[int]
    medium: str
    group_idx: int | None = None


class _Cleared(msgspec.Struct, tag="AllBlocksCleared", gc=False):
    pass


class _StoredArray(_Stored, array_like=True):
    pass


class _RemovedArray(_Removed, array_like=True):
    pass


class _ClearedArray(_Cleared, array_like=True):
    pass


class BatchEncoder:
    """Encodes the batches of one engine."""

    def __init__(self, encoding: Encoding, replica: int, block_size: int, window: int) -> None:
        self._replica, self._block_size, self._window = replica, block_size, window
        is_map = encoding == "map"
        self._stored_type: type[_Stored] = _Stored if is_map else _StoredArray
        self._removed_type: type[_Removed] = _Removed if is_map else _RemovedArray
        self._cleared = _Cleared() if is_map else _ClearedArray()
        self._encode = msgspec.msgpack.Encoder().encode

    def encode(self, seconds: float, events: Iterable[IndexEvent]) -> bytes:
        """Returns the payload: the Unix time in seconds, the events, and the index of the replica."""
        return self._encode((seconds, [self._event(event) for event in events], self._replica))

    def _event(self, event: IndexEvent) -> Any:
        if isinstance(event, BlocksStored):
            return self._stored(event)
        if isinstance(event, BlocksRemoved):
            return self._removed_type(list(map(event_hash, event.hashes)), event.medium, event.group)
        return self._cleared

    def _stored(self, event: BlocksStored) -> _Stored:
        extra: list[list[str] | None] = [None] * len(event.hashes)
        if event.cache_salt:
            extra[0] = [event.cache_salt]
        return self._stored_type(
            block_hashes=list(map(event_hash, event.hashes)),
            parent_block_hash=None if event.parent is None else event_hash(event.parent),
            token_ids=event.token_ids.tolist(),
            block_size=self._block_size,
            lora_id=event.adapter.id or None,
            medium=event.medium,
            lora_name=event.adapter.name or None,
            extra_keys=extra,
            group_idx=event.group,
            kv_cache_spec_kind=_KINDS[event.group],
            kv_cache_spec_sliding_window=self._window if event.group is CacheGroup.WINDOW else None,
        )
