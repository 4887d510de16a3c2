"""Request bodies of the conversation endpoints."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from chorale.api import limits
from chorale.api.fields import triage
from chorale.api.http.responses import parse_model
from chorale.api.responses.request import Include

_Items = Annotated[list[dict[str, Any]], limits.items("conversation_items")]
_Key = Annotated[str, limits.items("metadata_key")]
_Value = Annotated[str, limits.items("metadata_value")]
_Metadata = Annotated[dict[_Key, _Value], limits.items("metadata")]


class CreateConversation(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    items: _Items = Field(default_factory=list)
    metadata: _Metadata = Field(default_factory=dict)


class UpdateConversation(BaseModel):
    """``metadata`` replaces the previous metadata; null clears it."""

    model_config = ConfigDict(extra="forbid", strict=True)

    metadata: _Metadata


class CreateItems(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    items: Annotated[_Items, Field(min_length=1)]
    include: list[Include] = Field(default_factory=list)


def read_create(data: dict[str, Any]) -> CreateConversation:
    return parse_model(CreateConversation, triage(data, CreateConversation.model_fields, {}, {}))


def read_update(data: dict[str, Any]) -> UpdateConversation:
    kept = triage(data, UpdateConversation.model_fields, {}, {})
    if "metadata" in data:  # a missing field must not clear the metadata
        kept.setdefault("metadata", {})
    return parse_model(UpdateConversation, kept)


def read_items(data: dict[str, Any]) -> CreateItems:
    return parse_model(CreateItems, triage(data, CreateItems.model_fields, {}, {}))
