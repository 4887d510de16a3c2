"""Every field of the generating requests is described in their JSON schemas; no description is unused."""

from __future__ import annotations

import pytest
from pydantic import BaseModel

from chorale.api.chat.request import ChatRequest
from chorale.api.completions.request import CompletionRequest
from chorale.api.field_docs import DOCS
from chorale.api.messages.request import MessagesRequest
from chorale.api.responses.request import ResponsesRequest
from chorale.api.tokens.generated import DerenderChatRequest, DerenderCompletionRequest
from chorale.api.tokens.request import AbortRequest, GenerateRequest, TokenSampling
from scripts.api_docs import ECHOED

MODELS: list[type[BaseModel]] = [
    *(ChatRequest, CompletionRequest, MessagesRequest, ResponsesRequest, GenerateRequest, TokenSampling),
    *(AbortRequest, DerenderChatRequest, DerenderCompletionRequest),
]


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)
def test_every_field_that_acts_is_described(model: type[BaseModel]) -> None:
    fields = model.model_json_schema()["properties"]
    echoed = ECHOED if model is ResponsesRequest else {}
    assert [name for name, field in fields.items() if name not in echoed and "description" not in field] == []


def test_every_description_is_that_of_a_field() -> None:
    known = {
        name
        for model in MODELS
        for field in model.model_fields
        for name in (field, f"{model.__name__}.{field}")
    }
    assert DOCS.keys() <= known
