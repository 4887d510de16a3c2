"""Request bodies of the conversation endpoints."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from chorale.api import limits
from chorale.api.fields import Include, Metadata, StrictModel, parse

_Items = Annotated[list[dict[str, Any]], limits.items("conversation_items")]
_Metadata = Annotated[Metadata, limits.items("metadata")]


class CreateConversation(StrictModel):
    items: _Items = Field(default_factory=list)
    metadata: _Metadata = Field(default_factory=dict)


class UpdateConversation(StrictModel):
    """``metadata`` replaces the previous metadata; null clears it."""

    metadata: _Metadata


class CreateItems(StrictModel):
    items: Annotated[_Items, Field(min_length=1)]
    include: list[Include] = Field(default_factory=list)


def read_update(data: dict[str, Any]) -> UpdateConversation:
    if data.get("metadata", {}) is None:  # a missing field must not clear the metadata
        data = {**data, "metadata": {}}
    return parse(UpdateConversation, data)
